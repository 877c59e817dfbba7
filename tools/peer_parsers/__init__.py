"""Runs the parser tests of vLLM and SGLang against modelmill's parsers."""
