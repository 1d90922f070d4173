"""Reading draft heads that were published in other layouts."""
