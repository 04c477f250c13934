"""Benchmarks of softmax attention."""
