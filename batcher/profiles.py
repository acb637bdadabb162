"""Named presets: how to batch for a kind of workload."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from batcher import checks

PROFILES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # All records are alike: batches of one size, as large as the device allows.
        "uniform_length": MappingProxyType(
            {"forming": "static", "max_batch_size": 256, "prefetch_batches": 1}
        ),
        # Lengths vary and the model pads: like goes with like, and the budget is the padded one.
        "variable_length": MappingProxyType({"forming": "sorted", "padded": True, "prefetch_batches": 1}),
        # Each answer is awaited: short waits, and nothing is decided before it has to be.
        "real_time": MappingProxyType({"batch_timeout_s": 0.05, "prefetch_batches": 0}),
        # Bulk work: batches of 32 to 64, two at a time.
        "high_throughput": MappingProxyType(
            {
                "min_batch_size": 32,
                "max_batch_size": 64,
                "batch_timeout_s": 0.1,
                "prefetch_batches": 2,
                "max_concurrent_batches": 2,
            }
        ),
    }
)
"""Arguments of `DynamicBatcher` by the name of the workload."""


def profile(name: str, **overrides: Any) -> dict[str, Any]:
    """Return a preset as arguments: `DynamicBatcher(process, **profile("real_time"))`.

    Args:
        name: A key of `PROFILES`.
        overrides: Arguments that replace those of the preset, or go with them.

    Raises:
        ValueError: There is no such preset.
    """
    checks.one_of("profile", name, PROFILES)
    return {**PROFILES[name], **overrides}
