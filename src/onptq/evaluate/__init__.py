"""Tasks and what is measured on them."""
