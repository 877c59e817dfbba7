"""Image decoding, prompts, masks and the segmentation model (SAM)."""
