"""Calibration prompts: what a manifest line says, and how a manifest is read."""
