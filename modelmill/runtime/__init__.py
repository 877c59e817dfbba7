"""The step loop: scheduling, KV pages, model execution, sampling and output processing."""
