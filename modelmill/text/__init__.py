"""Tokenizers, chat templates, stop strings, grammars and tool calls."""
