"""Streams of requests: texts that begin and end at different times in one batch."""
