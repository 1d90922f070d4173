"""Why heads accept little, and why two texts differ: hypotheses and comparisons on the user's own target."""
