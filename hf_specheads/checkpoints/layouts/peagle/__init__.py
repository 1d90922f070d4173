"""P-EAGLE's layout."""
