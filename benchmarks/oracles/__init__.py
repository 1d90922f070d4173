"""Other people's programs as judges of our exports; each runs in an environment of its own."""
