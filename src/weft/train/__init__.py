"""The trainer: a hybrid language model that uses every family, its runs and their reports."""
