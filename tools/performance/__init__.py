"""docs/performance.md from the rows in benchmarks/results and the story written beside it."""
