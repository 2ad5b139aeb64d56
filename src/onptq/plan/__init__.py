"""The plan of a run before it starts, from config.json, safetensors headers and this machine."""
