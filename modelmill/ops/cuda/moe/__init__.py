"""Mixtures of experts: grouped products of a few rows an expert with weights of 4 and 8 bits."""
