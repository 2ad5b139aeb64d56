"""The page: every run and every comparison as one HTML file that shows where decisions changed."""
