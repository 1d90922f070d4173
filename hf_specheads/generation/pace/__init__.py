"""What the next round drafts where nobody has chosen: what rounds cost, and what they give."""
