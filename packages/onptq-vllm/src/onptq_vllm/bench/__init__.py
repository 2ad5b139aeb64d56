"""How fast a checkpoint runs in a real engine, beside the dense one: prefill, decode, memory, and the kernel that ran."""
