"""Publishing draft heads on the Hub."""
