"""Named presets: how to batch for a kind of workload. The README says which profile is for which work."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from batcher import checks
from batcher.tokens import BatchOptions

_PRESETS: dict[str, BatchOptions] = {
    "uniform_length": {"forming": "static", "max_batch_size": 256, "prefetch_batches": 1},
    "variable_length": {"forming": "sorted", "padded": True, "prefetch_batches": 1},
    "real_time": {"batch_timeout_s": 0.05, "prefetch_batches": 0},
    "high_throughput": {
        "min_batch_size": 32,
        "max_batch_size": 64,
        "batch_timeout_s": 0.1,
        "prefetch_batches": 2,
        "max_concurrent_batches": 2,
    },
}
PROFILES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: MappingProxyType(preset) for name, preset in _PRESETS.items()}
)
"""Arguments of `DynamicBatcher` by the name of the workload."""


def profile(name: str, **overrides: Any) -> dict[str, Any]:
    """Return a preset of `PROFILES` as arguments, with `overrides` in the place of its own or beside them."""
    checks.one_of("profile", name, PROFILES)
    return {**PROFILES[name], **overrides}
