"""Matrix optimizers: each matrix has an owner that works on it; the rules are files of this package."""
