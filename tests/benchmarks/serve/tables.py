"""Tables of the samples: the figures of each candidate, then ours relative to the others."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tests.benchmarks.measuring import Row, Table
from tests.benchmarks.serve.loads import Load
from tests.benchmarks.serve.models import about
from tests.benchmarks.serve.rounds import Samples
from tests.benchmarks.serve.servers import OFFLINE, OURS, RAY, RAY_DIRECT, SEEDS, VARIANTS, VLLM
from tests.benchmarks.serve.ways import HANDLE

UNITS = {
    "prompts_per_s": ("prompts/s", "/s"),
    "tokens_per_s": ("output tokens/s", "tok/s"),
    "ttft_p50_ms": ("TTFT p50", "ms"),
    "ttft_p99_ms": ("TTFT p99", "ms"),
    "tpot_p50_ms": ("TPOT p50", "ms"),
    "tpot_p99_ms": ("TPOT p99", "ms"),
    "gap_p99_ms": ("gap between chunks p99", "ms"),
    "gap_max_ms": ("gap between chunks, longest", "ms"),
    "first_events": ("events in the first chunk", ""),
    "latency_p50_ms": ("latency p50", "ms"),
    "latency_p99_ms": ("latency p99", "ms"),
    "cpu": ("CPU per 1,000 output tokens", "s"),
    "start_s": ("start", "s"),
    "memory_mib": ("memory", "MiB"),
}
"""Name and unit of each quantity; the groups of the CPU time follow its sum."""


@dataclass(frozen=True, slots=True)
class Target:
    """A target of the median of ours, alone or relative to another server.

    Attributes:
        quantity: The quantity.
        other: Server to compare with; None: none.
        by: "/" for the ratio of ours to the other, "-" for the difference.
        ours: Candidate of ours.
        at_most: Upper bound; None: none.
        at_least: Lower bound; None: none.
    """

    quantity: str
    other: str | None = None
    by: Literal["/", "-"] = "/"
    ours: str = OURS
    at_most: float | None = None
    at_least: float | None = None


_STREAM = (
    Target("tokens_per_s", VLLM, at_least=1.0),
    Target("tokens_per_s", RAY_DIRECT, at_least=1.25),
    Target("tokens_per_s", RAY, at_least=2.3),
    Target("ttft_p50_ms", VLLM, by="-"),
    Target("ttft_p99_ms", VLLM, at_most=1.0),
    Target("cpu", VLLM),
    *(Target(quantity, variant) for variant in VARIANTS for quantity in ("tokens_per_s", "cpu")),
)
_PLAIN = (
    *(Target("tokens_per_s", other) for other in (VLLM, RAY_DIRECT, RAY)),
    Target("latency_p50_ms", VLLM),
    Target("latency_p99_ms", VLLM),
    Target("cpu", VLLM),
)
_LISTS = (
    *(Target("prompts_per_s", VLLM, ours=ours, at_least=1.3) for ours in (OURS, HANDLE)),
    *(Target("prompts_per_s", OFFLINE, ours=ours, at_least=0.95) for ours in (OURS, HANDLE)),
    Target("prompts_per_s", SEEDS),
    Target("cpu", VLLM),
    *(Target(quantity, variant) for variant in VARIANTS for quantity in ("prompts_per_s", "cpu")),
)
TARGETS: Mapping[str, Sequence[Target]] = {
    "stream-1": (
        *(
            Target("ttft_p50_ms", other, by="-", at_most=most)
            for other, most in ((VLLM, 3.0), (RAY_DIRECT, None))
        ),
        Target("tpot_p50_ms", VLLM),
        # An event with the role and one with the first token, which did not wait for the second.
        Target("first_events", at_most=2),
        Target("cpu", VLLM),
    ),
    "stream-32": (*_STREAM, Target("gap_p99_ms", at_most=100)),
    "stream-128": _STREAM,
    "prefix-32": [replace(target, at_least=None, at_most=None) for target in _STREAM],
    "unary-32": _PLAIN,
    "unary-128": _PLAIN,
    "generate": _LISTS,
    "generate-short": _LISTS,
    "mixed": (
        Target("tokens_per_s", SEEDS, at_least=1.8),
        Target("latency_p50_ms", SEEDS, at_most=0.4),
        Target("tokens_per_s", VLLM),
        Target("latency_p50_ms", VLLM),
        Target("tokens_per_s", OFFLINE),
    ),
}
"""Targets by load."""

_SHOWN = (Target("tokens_per_s", VLLM), Target("ttft_p50_ms", VLLM, by="-"), Target("cpu", VLLM))
_CLOSE = (Target("tokens_per_s", VLLM, at_least=0.98), Target("ttft_p99_ms", VLLM, by="-"))
_LEVEL = (
    Target("tokens_per_s", VLLM, at_least=0.99),
    *(Target(quantity, VLLM, by="-", at_most=5.0) for quantity in ("ttft_p50_ms", "ttft_p99_ms")),
)
_DEVICE: Mapping[str, Sequence[Target]] = {
    **{f"device-{n}": _SHOWN for n in (1, 8, 32, 64, 128)},
    "device-burst": [Target(each, VLLM, by="-") for each in ("ttft_p50_ms", "ttft_p99_ms")],
    "device-lists": (
        Target("tokens_per_s", VLLM, at_least=1.0),
        Target("tokens_per_s", SEEDS, at_least=1.8),
        Target("latency_p50_ms", SEEDS, at_most=0.4),
    ),
    "device-long": (
        Target("ttft_p50_ms", VLLM, by="-", at_most=20.0),
        Target("ttft_p99_ms", VLLM, by="-"),
        Target("tokens_per_s", VLLM),
    ),
}
DEVICE_TARGETS: Mapping[str, Mapping[str, Sequence[Target]]] = {
    "l4-7b": {f"device-{n}": _LEVEL for n in (1, 32, 64)},
    "h100-7b": {
        "device-1": (_CLOSE[0], Target("ttft_p50_ms", VLLM, by="-", at_most=2.0)),
        "device-8": _CLOSE,
        "device-32": (*_CLOSE, Target("ttft_p50_ms", VLLM, by="-")),
        "device-burst": (
            Target("ttft_p50_ms", VLLM, by="-", at_most=15.0),
            Target("ttft_p99_ms", VLLM, by="-", at_most=30.0),
        ),
        "device-128": (
            Target("tokens_per_s", VLLM, at_least=0.95),
            Target("ttft_p99_ms", VLLM, at_most=1.5),
        ),
    },
}
"""Targets by device, then by load; `_DEVICE` has the others."""


def targets(load: str, model: str) -> Sequence[Target]:
    """Return the targets of a load with a model, or a simulated device."""
    if load in _DEVICE:
        return DEVICE_TARGETS.get(model, {}).get(load, _DEVICE[load])
    return TARGETS.get(load, ())


def table(load: Load, name: str, found: Mapping[str, Samples], model: str) -> Table:
    """Return a load's table.

    Args:
        load: The load.
        name: Name of the load.
        found: Samples by candidate.
        model: Name of the model.
    """
    return Table(f"{load.about}; {load.lengths}; {about(model)}.", rows(found, targets(name, model)))


def rows(found: Mapping[str, Samples], targets: Sequence[Target]) -> list[Row]:
    """Return the rows of samples by candidate: all quantities, then the relations that the targets name."""
    return [*_figures(found), *_relations(found, targets)]


def start_table(found: Mapping[str, Samples]) -> Table:
    """Return the table of start-up time and memory."""
    setting = "from the command to a healthy service; memory after the loads, shared pages in proportion."
    return Table(setting, list(_figures(found)))


def _figures(found: Mapping[str, Samples]) -> Iterator[Row]:
    for quantity, (label, unit) in UNITS.items():
        for candidate, samples in found.items():
            if quantity in samples:
                yield Row(f"{candidate}: {label}", unit, list(samples[quantity].values()))
    for candidate, samples in found.items():
        for part in samples:
            if part.startswith("cpu: "):
                yield Row(f"{candidate}: CPU, {part[5:]}", "s", list(samples[part].values()))


def _relations(found: Mapping[str, Samples], targets: Sequence[Target]) -> Iterator[Row]:
    for target in targets:
        label, unit = UNITS[target.quantity]
        ours = found.get(target.ours, {}).get(target.quantity)
        if not ours:
            continue
        if target.other is None:
            yield Row(f"{label}: {target.ours}", unit, list(ours.values()), target.at_most, target.at_least)
            continue
        other = best(found, target.other)
        if other is None:
            continue
        theirs = found[other][target.quantity]
        pairs = [(ours[number], theirs[number]) for number in ours if number in theirs]
        if not pairs:
            continue
        ratio = target.by == "/"
        samples = [mine / its if ratio else mine - its for mine, its in pairs]
        what = f"{label}: {target.ours} {target.by} {other}"
        yield Row(what, "x" if ratio else unit, samples, target.at_most, target.at_least)


def best(found: Mapping[str, Samples], name: str) -> str | None:
    """Return the candidate of a server with the highest throughput of single prompts; None: there is none."""
    own = [each for each in found if each == name or (each.startswith(f"{name}, ") and each[-5:] != "lists")]
    return max(own, key=lambda each: statistics.median(found[each]["tokens_per_s"].values()), default=None)
