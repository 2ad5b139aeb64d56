"""Servers with an OpenAI-compatible interface: their processes, a client, and exact token ids of vLLM."""
