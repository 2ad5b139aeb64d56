"""Experiments over the cycle, each a short module that can be run: `python -m onptq.experiments.NAME --help`."""
