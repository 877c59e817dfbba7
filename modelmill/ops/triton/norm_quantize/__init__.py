"""Norms, activation functions and quantization of activations, and what fuses them."""
