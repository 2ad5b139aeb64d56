"""The factory of the embedded models: lessons, training, the atlas of sprites, and exams."""
