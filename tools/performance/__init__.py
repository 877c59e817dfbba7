"""docs/performance.md and its plots from benchmarks/results, and the index of docs/notes."""
