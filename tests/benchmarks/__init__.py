"""Benchmarks, each a command such as `make bench NAME=batcher`: tables, and files in `results/`."""
