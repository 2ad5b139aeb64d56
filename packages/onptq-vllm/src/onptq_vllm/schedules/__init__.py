"""`onptq tune`: faster schedules for the products of a checkpoint on this GPU, and the plugin by which vLLM takes them."""
