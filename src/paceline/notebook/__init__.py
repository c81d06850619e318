"""The cells of a notebook on N ranks: `%load_ext paceline`."""
