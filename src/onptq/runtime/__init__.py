"""Low-bit linears that multiply integers, in place of the simulated ones of a loaded model or a policy."""
