"""Benchmarks of scans."""
