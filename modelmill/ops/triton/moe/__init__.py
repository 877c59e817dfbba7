"""Mixtures of experts: routing, alignment of tokens by expert, and grouped products."""
