"""Memory and traffic of data-parallel training, before it starts and beside what was measured.

`closed_form` plans a transformer from its numbers and needs no torch; `of_model` follows a real model with tensors that
have no memory. Both give their numbers to `rank_memory`, where all arithmetic is.
"""
