"""Ops: torch references, the registry of backends, and the backends themselves."""
