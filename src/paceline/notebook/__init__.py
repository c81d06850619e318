"""N ranks behind every cell of a notebook: `%load_ext paceline`."""
