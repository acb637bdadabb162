"""CPU time, latency and memory of the batcher, beside others: `python -m tests.benchmarks.batcher --help`."""
