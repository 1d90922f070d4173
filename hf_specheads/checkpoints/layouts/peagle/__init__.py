"""P-EAGLE heads as their authors save them."""
