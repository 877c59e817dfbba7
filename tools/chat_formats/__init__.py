"""Random conversations in every chat format: streamed = whole = written back."""
