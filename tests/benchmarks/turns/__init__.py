"""Benchmark of models that take turns, in virtual time."""
