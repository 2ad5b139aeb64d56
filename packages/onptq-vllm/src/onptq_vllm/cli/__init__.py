"""The commands that this package adds to `onptq`. They import nothing heavy until they run."""
