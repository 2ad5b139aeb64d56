"""Triton kernels that only serving uses: they end in the int8 codes of activations."""
