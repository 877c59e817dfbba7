"""Other makers' APIs on the chat service: Anthropic Messages and Ollama."""
