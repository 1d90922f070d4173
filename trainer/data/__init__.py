"""Data preparation: turns data sets into batches of token ids and loss masks."""
