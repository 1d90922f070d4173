"""Command line: `specheads ...` or `python -m hf_specheads ...`."""
