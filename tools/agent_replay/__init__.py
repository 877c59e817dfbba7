"""Replays an agent's long session against a server and reports what came from the prefix cache."""
