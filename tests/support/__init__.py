"""Helpers that tests share: targets, heads, trees, checkpoints and a local Hub."""
