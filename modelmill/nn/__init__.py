"""Modules that models are made of."""
