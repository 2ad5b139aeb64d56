"""Low-bit linears in place of the simulated ones of a loaded checkpoint, by PyTorch or by humming-kernels."""
