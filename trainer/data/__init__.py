"""From any data set to batches of token ids and loss masks."""
