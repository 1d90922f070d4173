"""What a training step costs."""
