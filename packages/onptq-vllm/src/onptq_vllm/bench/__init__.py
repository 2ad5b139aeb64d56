"""The speed of checkpoints in a real engine: prefill, decode, memory, and the kernel that ran."""
