"""The papers' figures for any target and heads: measurements, drawing, and the page that shows them."""
