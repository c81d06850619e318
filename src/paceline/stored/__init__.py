"""Values and tensors as bytes in a file, without pickle: what checkpoints and failure capsules are made of."""
