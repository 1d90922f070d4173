"""Measurements of the shipped pair, or of any other target and heads; results are JSON with their provenance."""
