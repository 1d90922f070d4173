"""The layouts of other libraries: one folder each, with what it reads and what it writes."""
