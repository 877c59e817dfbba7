"""Maintenance tools: verification, conformance, generated pages, version matrix, soak tests."""
