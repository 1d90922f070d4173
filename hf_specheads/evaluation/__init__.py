"""Measures with the metrics and prompts that other projects use, so that numbers can be compared."""
