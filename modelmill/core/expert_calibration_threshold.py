"""How many tokens of a batch an expert must have so that it is calibrated on its own."""

MIN_EXPERT_TOKENS = 64
"""With fewer, ranges and products of inputs are by chance: the expert is calibrated on all tokens
of its layer.
"""
