"""Masks of image segmentation."""
