"""Attention over pages of keys and values, and rotary embeddings."""
