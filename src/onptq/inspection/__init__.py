"""What a checkpoint is, whoever made it, and what is wrong with it: headers and JSON only, no weights."""
