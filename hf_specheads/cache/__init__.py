"""Caches of the target and of the draft heads, and the masks that say which slots a row sees."""
