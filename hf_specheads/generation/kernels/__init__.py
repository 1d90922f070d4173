"""Computing forwards of a few rows fast: matrix products, attention, and the context they run in."""
