"""Benchmarks of linear attention and its kernels."""
