"""One file for each group of paths; every module has ``router``."""
