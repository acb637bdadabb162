"""Queries of Prometheus over the metrics of the service."""

from k8s.dashboard.panel import Query
from serve_app.telemetry.catalogue import Metric

HERE = 'application=~"$application", model=~"$model"'
MODEL = 'model=~"$model"'
VLLM = 'model_name=~"$model"'
SERVE = 'application=~"$application"'


def rate(metric: Metric, by: str, labels: str = HERE) -> str:
    """Return the rate of a counter, summed over replicas."""
    return f"sum by ({by}) (rate({metric.exported}{{{labels}}}[$__rate_interval]))"


def total(metric: Metric, by: str, labels: str = HERE) -> str:
    """Return a gauge, summed over replicas."""
    return f"sum by ({by}) ({metric.exported}{{{labels}}})"


def highest(metric: Metric, by: str, labels: str = HERE) -> str:
    """Return the highest value of a gauge over replicas."""
    return f"max by ({by}) ({metric.exported}{{{labels}}})"


def quantile(share: float, name: str, by: str, labels: str = HERE) -> str:
    """Return a quantile of a histogram."""
    grown = f"sum by (le, {by}) (rate({name}_bucket{{{labels}}}[$__rate_interval]))"
    return f"histogram_quantile({share}, {grown})"


def quantiles(name: str, by: str, legend: str, labels: str = HERE) -> tuple[Query, ...]:
    """Return the median and the 95th percentile of a histogram."""
    return tuple(
        Query(quantile(share, name, by, labels), f"{legend} p{share * 100:.0f}") for share in (0.5, 0.95)
    )


def vllm(name: str) -> str:
    """Return the rate of one of vLLM's counters."""
    return f"sum by (model_name) (rate(ray_vllm_{name}_total{{{VLLM}}}[$__rate_interval]))"
