"""Generator of the Grafana dashboard: `python -m k8s.dashboard`."""
