"""Measurements of `specheads doctor` and `specheads diff` on planted and sound heads, and of run times of commands."""
