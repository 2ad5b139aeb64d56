"""The calibration sets of the paper, from copies of the data they were drawn from."""
