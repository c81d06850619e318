"""Measures: the same training step under paceline and its peers, interleaved in one run.

The conductor, which users call, imports no torch: every contender lives in processes of its own.
"""
