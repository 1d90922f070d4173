"""Layouts of other libraries: one folder per layout, with its readers and writers."""
