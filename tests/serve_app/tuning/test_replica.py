"""The model of a replica beside one that is stepped one by one."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.tuning.twin import IDLE, STEPS, Replica, ReplicaSettings, Request
from serve_app.tuning.workload import TokenLengths, Workload
from tests.serve_app.tuning.doubles import one_by_one, profile


def request(number: int, prompt: int, output: int, reserved: int | None = None) -> Request:
    return Request(number, 0.0, prompt, prompt, output, reserved or prompt + output, 0.0)


def drive(replica: Replica, arrivals: list[tuple[float, Request]]) -> list[Request]:
    """Run a replica until all requests are complete, and return them in the order of their ends."""
    ended: list[Request] = []
    coming = list(reversed(arrivals))
    while coming or replica.ends_at < IDLE:
        if coming and coming[-1][0] < replica.ends_at:
            at, one = coming.pop()
            replica.arrive(one, at)
        else:
            ended += replica.advance(coming[-1][0] if coming else IDLE)
    return ended


MEAN = 20
LOAD = Workload(1.0, TokenLengths(50), TokenLengths(MEAN), MEAN)

SHAPES = st.fixed_dictionaries(
    {
        "async_scheduling": st.booleans(),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 200),
        "kv_tokens": st.integers(200, 700),
        "per_kv_token_ms": st.sampled_from([0.0, 0.01, 0.4]),
    }
)
COMING = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=14)


@given(SHAPES, st.one_of(st.none(), st.integers(1, 6)), COMING)
def test_the_steps_are_those_of_single_steps(
    shape: dict[str, Any], max_running: int | None, coming: list[tuple[float, int, int]]
) -> None:
    device = profile(max_model_len=150, **shape)
    chosen = replace(ReplicaSettings.of(device, live_first=False), max_running=max_running)
    at, arrivals = 0.0, []
    for number, (gap, prompt, output) in enumerate(coming):
        at += gap + 1e-3
        arrivals.append((at, request(number, prompt, output)))
    places = device.max_num_seqs
    most = places + min(places, math.ceil(STEPS * places / MEAN))
    expected = one_by_one(device, chosen, min(most, max_running or most), arrivals)
    replica = Replica(device, chosen, LOAD)
    ended = drive(replica, arrivals)
    assert len(ended) == len(arrivals), "a request was lost"
    for one in ended:
        assert (one.first_at, one.ended_at) == pytest.approx(expected[one.number], abs=1e-9)
    assert replica.most_held <= device.kv_tokens
    assert replica.most_running <= chosen.max_num_seqs


def test_a_lone_request_takes_its_steps() -> None:
    device = profile(per_kv_token_ms=0.0)
    replica = Replica(device, ReplicaSettings.of(device), LOAD)
    one = request(0, 100, 11)
    drive(replica, [(2.0, one)])
    assert one.first_at == pytest.approx(2.0 + (10 + 5 + 0.3) / 1e3)
    assert one.ended_at - one.first_at == pytest.approx(10 * 10.3 / 1e3)
    assert replica.busy_s == pytest.approx(one.ended_at - 2.0)


def test_a_long_prompt_is_computed_in_parts() -> None:
    device = profile(per_kv_token_ms=0.0, per_sequence_ms=0.0)
    replica = Replica(device, replace(ReplicaSettings.of(device), max_num_batched_tokens=1000), LOAD)
    one = request(0, 2500, 1)
    drive(replica, [(0.0, one)])
    assert one.first_at == one.ended_at == pytest.approx((3 * 10 + 2500 * 0.05) / 1e3)


@pytest.mark.parametrize(
    ("asynchronous", "live_first", "at", "steps"),
    [
        (False, True, 0.208, 1),
        (True, False, 0.202, 2),
        # With live requests first, the next step is decided 5 ms before the running one ends.
        (True, True, 0.202, 1),
        (True, True, 0.208, 2),
    ],
)
def test_a_request_waits_for_the_steps_that_are_decided(
    asynchronous: bool, live_first: bool, at: float, steps: int
) -> None:
    device = profile(
        per_kv_token_ms=0.0, per_sequence_ms=0.0, per_prefill_token_ms=0.0, async_scheduling=asynchronous
    )
    replica = Replica(device, ReplicaSettings.of(device, live_first=live_first), LOAD)
    one, other = request(0, 10, 100), request(1, 10, 5)
    drive(replica, [(0.0, one), (at, other)])
    assert other.first_at == pytest.approx(0.20 + 0.01 * (steps + 1))


def test_what_does_not_fit_waits_in_order() -> None:
    device = profile(kv_tokens=1000, max_model_len=1000)
    replica = Replica(device, ReplicaSettings.of(device), LOAD)
    large = [request(number, 300, 20, reserved=600) for number in range(3)]
    small = request(3, 10, 2)
    drive(replica, [(0.001 * n, one) for n, one in enumerate([*large, small])])
    assert large[0].ended_at < large[1].first_at < large[2].first_at
    # It would fit beside the first one, but comes after those that don't.
    assert small.first_at > large[1].ended_at
    assert replica.most_held <= 1000


def test_max_running_bounds_the_requests_in_a_step() -> None:
    device = profile()
    replica = Replica(device, replace(ReplicaSettings.of(device), max_running=3), LOAD)
    drive(replica, [(0.0, request(number, 10, 30)) for number in range(12)])
    assert replica.most_running == 3
