"""Model cards rendered from facts."""
