"""Measurements, each one a command: `make bench-batcher`. They print a table and write `results/*.json`."""
