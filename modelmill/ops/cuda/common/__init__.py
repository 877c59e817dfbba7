"""What the CUDA kernels share: compilation, launches, wrapped instructions."""
