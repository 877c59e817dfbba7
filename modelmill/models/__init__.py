"""Model families: one file each, found by its model_type."""
