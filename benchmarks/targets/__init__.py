"""Which targets work with draft heads."""
