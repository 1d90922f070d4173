"""Draft trees against each other."""
