"""Serving OnPTQ's checkpoints: the vLLM plugin, `onptq tune` and `onptq bench`."""

__version__ = "0.1.0"
