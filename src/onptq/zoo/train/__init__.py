"""Training of the embedded models: `python -m onptq.zoo.train --family qwen2.5-vl --out DIR`."""
