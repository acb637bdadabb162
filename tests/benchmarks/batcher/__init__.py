"""How fast and how large the batcher is, beside others: `python -m tests.benchmarks.batcher --help`."""
