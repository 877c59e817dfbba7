"""Images in, masks out."""
