"""The chat formats, one file each; a format is found by its file name."""
