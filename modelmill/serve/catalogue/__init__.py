"""Engines that are loaded when a request names them, and unloaded when they are not needed."""
