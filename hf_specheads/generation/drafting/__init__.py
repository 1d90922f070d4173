"""Growing draft trees, and how far it pays to."""
