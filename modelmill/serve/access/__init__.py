"""What each API key may do: priority, share and limits."""
