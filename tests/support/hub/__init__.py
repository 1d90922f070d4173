"""A Hub on this machine, with real HTTP."""
