"""The loss of a batch: features of the target, one pass per draft position, and the losses of each pass."""
