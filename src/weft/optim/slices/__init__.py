"""AdamW whose state is sliced over the ranks."""
