"""The papers' figures for any pair: what is measured, how it is drawn, and the page around it."""
