"""EAGLE-1/2, HASS and PosS heads as their authors save them."""
