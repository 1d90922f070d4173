"""Checks of our exports with other projects' programs, each in an environment of its own."""
