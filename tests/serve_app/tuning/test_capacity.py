"""The rate and the times of a replica by arithmetic, beside the simulation."""

import pytest

from serve_app.simulation.profiles import PROFILES
from serve_app.tuning.fleet import Fleet, ReplicaSettings, closed_loop, open_loop
from serve_app.tuning.goals import parse_goals
from serve_app.tuning.planning import FitError, Trials, check_fit, expected_latency_s
from serve_app.tuning.workload import TokenLengths, Workload
from tests.serve_app.simulation.virtual_engine import vllm_here


def work(input: str, output: str, max_tokens: int | None = None) -> Workload:
    return Workload.of(1.0, TokenLengths.parse(input), TokenLengths.parse(output), max_tokens)


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "load", "tokens"),
    [
        ("h100-8b", work("256", "128"), 8192),
        ("h100-8b", work("1500", "100:60"), 512),
        # The KV cache holds fewer than 256.
        ("l4-7b", work("1500", "300", 1000), 2048),
    ],
    ids=["short", "small steps", "a full cache"],
)
def test_a_full_replica_has_its_rate(device: str, load: Workload, tokens: int) -> None:
    profile, settings = PROFILES[device], ReplicaSettings(tokens, 256)
    with vllm_here():
        found = closed_loop(Fleet(profile, settings, 1, load), load, 1, streams=400, requests=1_200)
    ends = sorted(each.ended_at for each in found.requests)
    measured = 600 / (ends[900] - ends[300])
    # At one request per second.
    full = 1 / Trials(profile, load, parse_goals("ttft_p99<1")).load(1, settings)
    assert full == pytest.approx(measured, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("rate", [1.0, 9.0])
def test_the_expected_latency_is_the_simulated_one(rate: float) -> None:
    profile, load = PROFILES["h100-8b"], work("1500", "300")
    with vllm_here():
        fleet = Fleet(profile, ReplicaSettings.of(profile), 1, load)
        found = open_loop(fleet, load, 1, rate=rate, warm_up=100, counted=300)
    mean = sum(each.latency_s for each in found.requests) / 300
    assert expected_latency_s(profile, load, rate) == pytest.approx(mean, rel=0.15)


def test_a_request_above_the_context_is_refused_with_the_sum() -> None:
    message = (
        "a prompt of 32,000 tokens and max_tokens 1,000 are 33,000, above the 32,768 of l4-7b's max_model"
    )
    with pytest.raises(FitError, match=message):
        check_fit(PROFILES["l4-7b"], work("32000", "1000"))
    with pytest.raises(FitError, match="the longest prompt of "):
        check_fit(PROFILES["l4-7b"], work("10000:12000", "100"))
    check_fit(PROFILES["l4-7b"], work("32000", "768"))


def test_a_request_above_the_cache_is_refused_with_the_sum() -> None:
    # No profile allows it by itself; one of a file may be changed.
    profile = PROFILES["l4-7b"].model_copy(update={"kv_tokens": 2_000})
    with pytest.raises(FitError, match=r"are 2,200, above the 2,000 of l4-7b's KV cache \(kv_tokens\)"):
        check_fit(profile, work("2000", "200"))
