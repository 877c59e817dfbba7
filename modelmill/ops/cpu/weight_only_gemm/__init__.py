"""Products of 16-bit activations with int8 or int4 weights."""
