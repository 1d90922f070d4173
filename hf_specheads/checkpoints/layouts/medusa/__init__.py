"""Medusa as its authors and vLLM save it."""
