"""What a run will do and cost, said before it starts: from config.json, safetensors headers and this machine."""
