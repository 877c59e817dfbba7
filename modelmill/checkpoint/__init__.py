"""Published checkpoints: safetensors, GGUF and PyTorch files under one set of names.

Start at `open.open_checkpoint`. A container (`safetensors`, `gguf`, `pth`) reads one format;
`gguf_hf` and `delta` present one container as another; `rename` maps a checkpoint's tensors to a
model's.
"""
