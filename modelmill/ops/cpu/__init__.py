"""C++ kernels for CPUs, prebuilt in wheels or compiled on the user's machine."""
