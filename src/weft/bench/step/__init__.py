"""Benchmarks of optimizer steps."""
