"""The trainer: a hybrid language model that uses every family of weft at once."""
