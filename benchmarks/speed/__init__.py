"""Measurements of tokens per second, and of where the time of a round goes."""
