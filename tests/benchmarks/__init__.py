"""Benchmarks, each a command such as `make bench-batcher`: they print tables and write `results/*.json`."""
