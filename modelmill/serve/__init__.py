"""Engines behind an HTTP API: each runs in a process of its own, the API in another."""
