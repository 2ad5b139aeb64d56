"""Training of the embedded models: `python -m tools.zoo.train --family qwen2.5-vl --out DIR`."""
