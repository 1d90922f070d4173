"""Reading draft heads from files and writing them in other layouts."""
