"""Long and rough treatment of a server, bounded in count or time: ``python -m tools.soak``."""
