"""Training on several devices: sharded targets, summed gradients, and device utilisation."""
