"""Hydra and Hydra++ as their authors save them."""
