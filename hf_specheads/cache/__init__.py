"""Where keys and values lie, and who sees them."""
