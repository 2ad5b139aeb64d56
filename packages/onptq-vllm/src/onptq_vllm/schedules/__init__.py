"""`onptq tune`: faster schedules for the GEMMs of a checkpoint on this GPU, and the plugin by which vLLM uses them."""
