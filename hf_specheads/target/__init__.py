"""The target, a frozen model: its identity, the modules borrowed from it, and the features read from it."""
