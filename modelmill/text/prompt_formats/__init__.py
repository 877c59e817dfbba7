"""How conversations become prompts in families without a chat template: one file each."""
