"""Which targets take draft heads, and how."""
