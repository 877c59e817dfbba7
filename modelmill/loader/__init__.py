"""Loads a model onto its device: the device, the weights, and how much memory KV pages may take."""
