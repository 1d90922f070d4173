"""Growing draft trees, and deciding how deep a chain should be."""
