"""Types, options, errors and helpers that every other package may import."""
