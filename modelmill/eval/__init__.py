"""Benchmarks, profiling and comparisons with other implementations."""
