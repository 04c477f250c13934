"""Benchmarks of matrix optimizers."""
