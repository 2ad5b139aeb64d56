"""Models for lmms-eval that give every arm the same prompt and the same decoding. Runs in its environment, without onptq."""
