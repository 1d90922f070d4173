"""Compiled steps of a round: each is compiled as one graph, and kept for later calls and processes."""
