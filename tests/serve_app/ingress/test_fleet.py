"""The choice of replicas in a simulated fleet: hits, spread and throughput beside chance and power of two.

Run with `-s` to see the figures.
"""

import dataclasses
import random
from collections.abc import Callable
from functools import cache

import pytest

from tests.serve_app.ingress.fleet import (
    H100_8B,
    L4_7B,
    Device,
    Fleet,
    Ours,
    PowerOfTwo,
    Random,
    Result,
    Router,
    Traffic,
)

SMALL = dataclasses.replace(H100_8B, capacity=32_768)
"""A device whose KV cache holds half of 64 prefixes of 896 tokens."""

Make = Callable[[random.Random, Callable[[], float]], Router]


def run(
    make: Make,
    replicas: int,
    traffic: Callable[[random.Random], Traffic] = Traffic,
    *,
    device: Device = H100_8B,
    clients: int = 16,
    ingresses: int = 1,
    requests: int = 2_000,
    label: str = "",
) -> Result:
    """Run a fleet with so many clients per replica, and print its figures."""
    fleet = Fleet(
        make, traffic, replicas=replicas, device=device, clients=clients * replicas, ingresses=ingresses
    )
    result = fleet.run(requests)
    name = getattr(make, "__name__", "")
    print(f"{label}{replicas} replicas, {ingresses} ingresses, {name:10}: {result}", flush=True)
    return result


@cache
def run_shared(make: Make, replicas: int, device: Device = H100_8B, ingresses: int = 1) -> Result:
    """Run a fleet with 64 prefixes, once for all tests."""
    return run(make, replicas, device=device, ingresses=ingresses)


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_fleet_hits_its_caches_as_often_as_one_replica_with_all_traffic(replicas: int) -> None:
    one = run_shared(Ours, 1)
    fleet = run_shared(Ours, replicas)
    assert fleet.hit_rate >= 0.95 * one.hit_rate
    assert fleet.spread <= 1.2
    assert fleet.ttft_p99_s <= 1.1 * run_shared(PowerOfTwo, replicas).ttft_p99_s


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_fleet_whose_prefill_dominates_makes_more_tokens_than_by_chance(replicas: int) -> None:
    fleet = run_shared(Ours, replicas, SMALL)
    assert fleet.tokens_per_s >= 1.4 * run_shared(Random, replicas, SMALL).tokens_per_s
    assert fleet.tokens_per_s >= 1.4 * run_shared(PowerOfTwo, replicas, SMALL).tokens_per_s
    assert fleet.spread <= 1.2


@pytest.mark.parametrize("replicas", [2, 4])
def test_without_shared_prefixes_a_fleet_is_as_fast_as_by_power_of_two(replicas: int) -> None:
    def traffic(draw: random.Random) -> Traffic:
        return Traffic(draw, prefixes=0, output=(8, 256))

    fleet = run(Ours, replicas, traffic, label="nothing shared: ")
    others = run(PowerOfTwo, replicas, traffic, label="nothing shared: ")
    assert fleet.tokens_per_s >= 0.98 * others.tokens_per_s
    assert fleet.ttft_p99_s <= 1.1 * others.ttft_p99_s
    assert fleet.spread <= 1.2


@pytest.mark.parametrize("device", [SMALL, H100_8B, L4_7B], ids=["small cache", "h100-8b", "l4-7b"])
def test_ingresses_that_know_different_things_are_better_than_chance(device: Device) -> None:
    """Each learns by itself where a prefix is, and sees its own load only."""
    results = {n: run_shared(Ours, 4, device, n) for n in (1, 2, 4, 8)}
    chance = run_shared(Random, 4, device)
    for ingresses, result in results.items():
        assert result.tokens_per_s >= chance.tokens_per_s, ingresses
        assert result.hit_rate > chance.hit_rate, ingresses
        assert result.spread <= 1.2


@pytest.mark.parametrize(
    ("label", "options"),
    [
        ("some prefixes are frequent: ", {"skew": 1.0}),
        ("prefixes begin alike: ", {"header": 640}),
        ("one prefix: ", {"prefixes": 1}),
    ],
)
def test_other_prefixes_are_no_worse_than_by_chance(label: str, options: dict[str, float]) -> None:
    def traffic(draw: random.Random) -> Traffic:
        return Traffic(draw, **options)  # type: ignore[arg-type]

    fleet = run(Ours, 4, traffic, label=label)
    chance = run(Random, 4, traffic, label=label)
    assert fleet.tokens_per_s >= chance.tokens_per_s
    assert fleet.spread <= 1.2


@pytest.mark.parametrize("clients", [1, 4])
def test_one_system_prompt_for_all_does_not_leave_replicas_idle(clients: int) -> None:
    def traffic(draw: random.Random) -> Traffic:
        return Traffic(draw, prefixes=1, output=64)

    fleet = run(Ours, 4, traffic, clients=clients, requests=600, label="one prefix, few clients: ")
    others = run(PowerOfTwo, 4, traffic, clients=clients, requests=600, label="one prefix, few clients: ")
    assert fleet.tokens_per_s >= 0.95 * others.tokens_per_s
    if clients > 1:
        assert fleet.spread <= 1.2


def test_replicas_that_die_and_come_leave_the_others_their_caches() -> None:
    fleet = Fleet(Ours, Traffic, replicas=4, clients=64)
    result = fleet.run(
        3_000,
        events=[
            (2.0, lambda fleet: fleet.remove("r1")),
            (4.0, lambda fleet: fleet.add("r4")),
            (6.0, lambda fleet: fleet.remove("r2")),
            (6.5, lambda fleet: fleet.add("r2")),
        ],
    )
    print(f"one dies, one comes, one starts again: {result}", flush=True)
    undisturbed = run(Ours, 4, requests=3_000)
    # The prefixes of a replica that is gone are computed once more elsewhere.
    assert result.hit_rate >= 0.95 * undisturbed.hit_rate
    for name in ("r2", "r4"):
        assert fleet.replicas[name].hit_tokens > 0


@pytest.mark.long
def test_a_thousand_replicas() -> None:
    def traffic(draw: random.Random) -> Traffic:
        return Traffic(draw, prefixes=8_000)

    options = {"replicas": 1_000, "clients": 4, "requests": 24_000, "device": SMALL}
    fleet = run(Ours, traffic=traffic, **options)  # type: ignore[arg-type]
    by_two = run(PowerOfTwo, traffic=traffic, **options)  # type: ignore[arg-type]
    chance = run(Random, traffic=traffic, **options)  # type: ignore[arg-type]
    # A cache of all prefixes misses each of them once.
    best = (896 / 1_024) * (1 - 8_000 / 24_000)
    print(f"hits of one cache for all: {best:.3f}", flush=True)
    assert fleet.hit_rate >= 0.95 * best
    assert fleet.tokens_per_s >= 1.2 * max(by_two.tokens_per_s, chance.tokens_per_s)
    # Each has two dozen requests: chance alone spreads them unevenly.
    assert fleet.most_over_mean <= chance.most_over_mean
