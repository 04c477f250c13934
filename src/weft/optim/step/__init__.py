"""One step over several optimizers: its parts, what ranks compare, orders, norms and records."""
