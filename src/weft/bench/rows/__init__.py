"""Benchmarks of embedding rows."""
