"""Prefixes, decoding, rollouts and the batch budget: what the cycle, the methods and the evaluation stand on."""
