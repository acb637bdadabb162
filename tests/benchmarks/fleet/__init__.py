"""Benchmark of a fleet: many simulated engines behind several Ingress replicas on one machine."""
