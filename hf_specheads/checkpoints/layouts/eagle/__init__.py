"""EAGLE-1/2, HASS and PosS as their authors save them."""
