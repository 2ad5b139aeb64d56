"""Writing a quantized checkpoint that transformers and vLLM load, and reading it back to be sure."""
