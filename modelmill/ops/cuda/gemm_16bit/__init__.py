"""Products with weights of 16 bits (on a CPU also float32)."""
