"""Runs llama.cpp's tests of its server against ``modelmill serve``."""
