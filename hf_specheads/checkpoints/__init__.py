"""Heads in files: in and out."""
