"""Models that come with OnPTQ, and the tasks they are calibrated and measured on."""
