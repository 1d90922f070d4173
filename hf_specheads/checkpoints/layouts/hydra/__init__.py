"""Hydra and Hydra++ heads as their authors save them."""
