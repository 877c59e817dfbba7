"""Several replicas of a server through Ray Serve: one front, prefix-aware routing, replacement."""
