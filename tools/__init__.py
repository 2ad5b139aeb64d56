"""Tools of the repository that are not part of the package."""
