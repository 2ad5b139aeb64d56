"""Checks of a checkpoint folder: static checks, reload and ask, fix."""
