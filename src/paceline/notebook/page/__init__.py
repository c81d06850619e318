"""What a person sees: output with a gutter of ranks, errors once, the boot, the status."""
