"""Products whose weights and activations are quantized to 8 bits or fewer."""
