"""Choosing what the next round drafts where the user has not: what rounds cost, and what they give."""
