"""Models that come with OnPTQ."""
