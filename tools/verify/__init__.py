"""Everything the engine promises that needs no GPU, shown on the real model and real data, one file
an item.
"""
