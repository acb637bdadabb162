"""The service on a virtual clock: what holds for every load, its arithmetic, and a real GPU beside it."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import psutil
import pytest

from batcher.stats import percentiles
from serve_app.simulation.profiles import PROFILES, Profile
from serve_app.tuning.fleet import Fleet, ReplicaSettings, Run, closed_loop, in_processes, open_loop
from serve_app.tuning.planning import lone_times
from serve_app.tuning.workload import BatchWork, StepGoals, TokenLengths, Workload
from tests.serve_app.simulation.virtual_engine import vllm_here
from tests.serve_app.tuning.doubles import profile

H100 = PROFILES["h100-7b"]


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    with vllm_here():
        yield


def work(rate: float = 1.0, input: str = "256", output: str = "128", **options: Any) -> Workload:
    return Workload.of(rate, TokenLengths.parse(input), TokenLengths.parse(output), **options)


def beside(rows: str, load: Workload | None = None, **goals: float) -> Workload:
    input, output = map(TokenLengths.parse, rows.split("/"))
    live = load or work(4.0, "256:100", "32:10")
    return replace(live, batch=BatchWork(input, output), goals=StepGoals(**goals))


def run(
    device: Profile,
    load: Workload,
    replicas: int = 1,
    seed: int = 1,
    counted: int = 40,
    *,
    overcommit: bool = False,
    live_first: bool = True,
) -> Run:
    chosen = replace(ReplicaSettings.of(device, live_first=live_first), overcommit=overcommit)
    fleet = Fleet(device, chosen, replicas, load, seed=seed)
    return open_loop(fleet, load, seed, rate=load.rate, warm_up=10, counted=counted)


def p99(found: Run, name: str) -> float:
    return percentiles([getattr(each, name) for each in found.requests], (0.99,))[0]


SMALL = {"kv_tokens": 4_000, "max_model_len": 4_000, "max_num_seqs": 6}


@pytest.mark.parametrize("overcommit", [False, True])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("rows", ["", "64/64", "900:300/40:30"])
def test_no_request_is_lost(rows: str, replicas: int, overcommit: bool) -> None:
    load = work(3.0 * replicas, "400:300", "20:10")
    found = run(profile(**SMALL), beside(rows, load) if rows else load, replicas, overcommit=overcommit)
    assert [each.number for each in found.requests] == list(range(10, 50))
    assert all(each.sent_at < each.first_at <= each.ended_at for each in found.requests)
    assert all(each.made == each.output for each in found.requests)
    assert 0 < found.busy <= 1
    assert 0 < found.held <= 1
    assert (found.row_tokens_per_s > 0) == bool(rows)


def test_a_seed_has_one_result() -> None:
    def times(seed: int) -> list[tuple[float, float, float]]:
        found = run(profile(), beside("64/64", work(8, "200:100", "30:20")), 2, seed, 20)
        return [(each.sent_at, each.first_at, each.ended_at) for each in found.requests]

    assert times(1) == times(1)
    assert times(1) != times(2)


@pytest.mark.parametrize(
    ("input", "output", "share"),
    [("256", "20", 0.0), ("5000:3000", "20:10", 0.0), ("900", "1", 0.0), ("1000", "20", 0.9)],
    ids=["plain", "a prompt in parts", "one token", "a cached prefix"],
)
def test_a_lone_request_has_the_times_of_the_arithmetic(input: str, output: str, share: float) -> None:
    device = profile(request_ms=12.0)
    load = work(1.0, input, output, prefix_share=share)
    settings = ReplicaSettings.of(device)
    fleet = Fleet(device, settings, 1, load)
    # The first request computes the prefix of the others.
    found = closed_loop(fleet, load, 0, streams=1, requests=8, warm_up=1).requests
    for request, draw in zip(found, islice(load.draws(0), 1, None), strict=False):
        expected = lone_times(device, load, settings, draw)
        assert (request.prompt, request.output) == (draw.prompt, draw.output)
        assert request.ttft_s == pytest.approx(expected.ttft_s)
        assert request.latency_s == pytest.approx(expected.latency_s)


def test_what_does_not_fit_waits_in_the_batcher() -> None:
    device = profile(kv_tokens=1_008, max_model_len=1_000)
    load = work(1.0, "300", "20", max_tokens=600)
    fleet = Fleet(device, ReplicaSettings.of(device), 1, load)
    found = closed_loop(fleet, load, 0, streams=3, requests=6)
    assert found.most_running == 1
    ends = [each.ended_at for each in found.requests]
    assert ends == sorted(ends)


def test_the_replicas_share_the_load() -> None:
    device, load = profile(), work(24.0, "256", "40:20")
    one, four = run(device, load, 1, counted=100), run(device, load, 4, counted=100)
    assert p99(four, "latency_s") < p99(one, "latency_s")
    assert four.most_running < one.most_running / 2


def test_rows_take_what_live_requests_leave() -> None:
    load = work(8.0, "256", "16")
    alone, both = (run(H100, each, counted=20) for each in (load, beside("64/64", load, tpot_s=0.03)))
    assert alone.row_tokens_per_s == 0
    assert alone.busy < 0.9
    assert both.busy == pytest.approx(1, abs=0.01)
    assert both.row_tokens_per_s > 5_000
    # The running step, and its own.
    assert p99(both, "ttft_s") < p99(alone, "ttft_s") + 0.05


def test_a_goal_bounds_the_steps_with_rows() -> None:
    free, held = run(H100, beside("2048/64")), run(H100, beside("2048/64", tpot_s=0.02))
    assert p99(held, "tpot_s") < 1.1 * 0.02 < p99(free, "tpot_s")
    assert 0 < held.row_tokens_per_s < free.row_tokens_per_s


def test_a_live_request_takes_the_place_of_a_row() -> None:
    device = H100.model_copy(update={"max_num_seqs": 4})
    load = beside("64/600", work(2.0, "256", "16"))
    first, arrival = (run(device, load, counted=10, live_first=each) for each in (True, False))
    # A row takes 4 s.
    assert p99(first, "ttft_s") < 0.1
    assert p99(arrival, "ttft_s") > 0.5


def test_rows_that_reserve_what_answers_have_been_run_in_greater_number() -> None:
    device = H100.model_copy(update={"kv_tokens": 33_000, "max_model_len": 4_096})
    load = beside("100/40:80", work(16.0, "64", "16"))
    usual, more = (run(device, load, counted=60, overcommit=each) for each in (False, True))
    assert more.row_tokens_per_s > 1.2 * usual.row_tokens_per_s


# A real GPU

MEASURED = {
    # Streams: tokens/s and TTFT p50 in ms.
    1: (158, 20.4),
    32: (3_780, 151.4),
    128: (8_883, 455.4),
    256: (11_080, 681.8),
}


@pytest.mark.long
@pytest.mark.parametrize("streams", MEASURED)
def test_a_real_h100_has_these_figures(streams: int) -> None:
    """256 tokens in, 128 out; the release of that day scheduled requests in the order of their arrival."""
    tokens_per_s, first_ms = MEASURED[streams]
    load = work()
    fleet = Fleet(H100, ReplicaSettings.of(H100, live_first=False), 1, load)
    requests = max(10, 4 * streams)
    found = closed_loop(fleet, load, 0, streams=streams, requests=requests).requests
    throughput = requests * 128 / max(each.ended_at for each in found) / tokens_per_s
    first = percentiles([each.ttft_s * 1e3 for each in found], (0.5,))[0] / first_ms
    print(f"{streams} streams: tokens/s {throughput:.2f}, TTFT p50 {first:.2f}")
    assert throughput == pytest.approx(1, abs=0.05)
    # One process served 256 streams, and the simulation has no CPU.
    assert first == pytest.approx(1, abs=0.15 if streams < 256 else 0.2)


# Processes


def empty(busy: float = 0.5) -> Run:
    return Run([], 0.0, busy, 0.0, 0, 0.0)


def test_processes_return_results_in_the_order_of_the_jobs() -> None:
    jobs = [partial(empty, each) for each in (0.1, 0.2, 0.3)]
    assert [found.busy for found in in_processes(jobs)] == [0.1, 0.2, 0.3]


def fail() -> Run:
    raise ValueError("no such load")


def die() -> Run:
    os.kill(os.getpid(), signal.SIGKILL)
    return empty()


def stay() -> Run:
    time.sleep(600)
    return empty()


@pytest.mark.parametrize(("job", "message"), [(fail, "no such load"), (die, "was killed")])
def test_a_failure_of_a_process_ends_the_others(job: Callable[[], Run], message: str) -> None:
    # Another test may have left a process that multiprocessing keeps.
    before = psutil.Process().children()
    with pytest.raises(Exception, match=message):
        in_processes([job, stay])
    left = set(psutil.Process().children()) - set(before)
    assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]
