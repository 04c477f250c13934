"""The report of a run: one HTML page, one picture."""
