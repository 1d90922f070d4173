"""Heads on the Hub."""
