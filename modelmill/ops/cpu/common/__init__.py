"""What the CPU kernels share: compilation, threads, vector instructions."""
