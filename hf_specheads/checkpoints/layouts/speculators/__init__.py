"""EAGLE-1/3, HASS, P-EAGLE, DFlash-1/2, DSpark and MTP heads as `speculators` saves them."""
