"""Triton implementations of the ops."""
