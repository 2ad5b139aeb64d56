"""Calibration prompts: manifests, images and audio."""
