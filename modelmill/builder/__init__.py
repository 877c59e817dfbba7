"""Building an engine from a checkpoint."""
