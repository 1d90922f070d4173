"""EAGLE-1, EAGLE-3 and HASS as `speculators` saves them."""
