"""Diagnoses on the user's own target: why few drafts are accepted, and why two texts differ."""
