"""The acceptance contract: comparison of a built engine with a float32 reference."""
