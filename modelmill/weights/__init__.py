"""Storage formats of weights: one file per format."""
