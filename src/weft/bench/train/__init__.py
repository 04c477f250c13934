"""Benchmarks of the trainer."""
