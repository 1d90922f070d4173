"""Medusa heads as their authors and vLLM save them."""
