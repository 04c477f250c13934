"""The trainer: a hybrid language model that uses every family at once, its data, loop, checkpoints and report."""
