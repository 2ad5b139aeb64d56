"""The commands that this package adds to `onptq`. Heavy packages are imported when a command runs."""
