"""CUDA C++ kernels for Hopper (sm_90a), compiled on the user's machine at first use."""
