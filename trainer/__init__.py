"""Training of draft heads; installed as `hf_specheads.trainer`."""
