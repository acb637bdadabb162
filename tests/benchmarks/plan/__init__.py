"""Benchmark of `saturate plan`: its model beside runs of the service on a simulated device."""
