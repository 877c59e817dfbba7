"""Quantization recipes and the algorithms they use."""
