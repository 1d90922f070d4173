"""The frozen model: who it is, what is borrowed of it, what is read from it."""
