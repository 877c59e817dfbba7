"""Exports engines to other servers."""
