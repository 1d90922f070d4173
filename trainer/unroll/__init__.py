"""The loss of a batch: features of the target, one pass per draft position, and what each is charged with."""
