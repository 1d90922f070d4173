"""Comparisons of draft trees."""
