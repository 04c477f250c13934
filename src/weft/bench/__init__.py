"""Benchmarks: every method beside what people use today, in one run, as ratios."""
