"""What the Triton kernels share: devices, launches, launch configs, conversions."""
