"""All-reduce between GPUs."""
