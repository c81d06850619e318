"""The reference trainer: a GPT from scratch, by the public API only. `loop.py` is the part to copy from."""
