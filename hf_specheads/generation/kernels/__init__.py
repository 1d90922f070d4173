"""How forwards of a few rows are computed: products, attention, and what runs around them."""
