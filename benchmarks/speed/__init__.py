"""Tokens per second, and where the time of a round goes."""
