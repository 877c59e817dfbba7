"""Several replicas of a server through Ray Serve: one proxy, prefix-aware routing, replacement."""
