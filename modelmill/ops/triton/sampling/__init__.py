"""Selection of the next token."""
