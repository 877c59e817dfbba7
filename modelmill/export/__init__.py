"""Ways out to other servers."""
