"""Steps of a round that are compiled whole, and kept."""
