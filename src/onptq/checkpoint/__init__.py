"""Checkpoint folders: one reader, one loader, one writer."""
