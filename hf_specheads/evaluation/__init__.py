"""Measuring in the words and on the prompts that others use, so that numbers can be laid side by side."""
