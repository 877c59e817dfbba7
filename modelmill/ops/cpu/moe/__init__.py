"""Mixtures of experts for few tokens."""
