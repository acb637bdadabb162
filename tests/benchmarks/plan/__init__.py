"""Benchmark of `saturate plan`: its figures beside runs of the service on a simulated device."""
