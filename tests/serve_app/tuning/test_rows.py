"""Rows of a batch beside live requests, in the model."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.stats import percentiles
from serve_app.simulation.profiles import PROFILES, Profile
from serve_app.tuning.goals import parse_goals
from serve_app.tuning.planning import NoPlanError, Search, Trials
from serve_app.tuning.twin import Fleet, ReplicaSettings, Run, open_loop
from serve_app.tuning.workload import BatchWork, StepGoals, TokenLengths, Workload
from tests.serve_app.tuning.doubles import profile

LIVE = Workload.of(4.0, TokenLengths.parse("256:100"), TokenLengths.parse("64:20"))
H100 = PROFILES["h100-7b"]


def beside(rows: str, **goals: float) -> Workload:
    input, output = map(TokenLengths.parse, rows.split("/"))
    return replace(LIVE, batch=BatchWork(input, output), goals=StepGoals(**goals))


def run(load: Workload, device: Profile = H100, *, counted: int = 300, overcommit: bool = False) -> Run:
    chosen = replace(ReplicaSettings.of(device), overcommit=overcommit)
    fleet = Fleet(device, chosen, 1, load, seed=1)
    return open_loop(fleet, load, 1, rate=load.rate, warm_up=60, counted=counted)


def p99(found: Run, name: str) -> float:
    return percentiles([getattr(each, name) for each in found.requests], (0.99,))[0]


@given(
    st.sampled_from(["64/64", "900:300/40:30", "300/200:150"]),
    st.integers(1, 12),
    st.integers(0, 1_000),
    st.booleans(),
)
def test_no_live_request_is_lost_beside_rows(rows: str, places: int, seed: int, overcommit: bool) -> None:
    device = profile(kv_tokens=4_000, max_model_len=4_000, max_num_seqs=places)
    load = replace(beside(rows), rate=2.0, input=TokenLengths(200), output=TokenLengths(30), max_tokens=30)
    chosen = replace(ReplicaSettings.of(device), overcommit=overcommit)
    found = open_loop(Fleet(device, chosen, 1, load, seed=seed), load, seed, rate=2.0, warm_up=5, counted=60)
    assert [each.number for each in found.requests] == list(range(5, 65))
    assert all(each.sent_at < each.first_at <= each.ended_at for each in found.requests)
    assert found.most_running <= places
    assert found.most_held <= device.kv_tokens
    assert found.row_tokens_per_s > 0


def test_rows_take_what_live_requests_leave() -> None:
    alone, both = run(LIVE), run(beside("64/256", tpot_s=0.03))
    assert alone.row_tokens_per_s == 0
    assert both.busy == pytest.approx(1)
    assert both.row_tokens_per_s > 15_000
    # The running step, and its own.
    assert p99(both, "ttft_s") < p99(alone, "ttft_s") + 0.04


@pytest.mark.parametrize("bound_s", [0.02, 0.03, 0.05])
def test_a_goal_bounds_the_steps_with_rows(bound_s: float) -> None:
    free, held = run(beside("2048/128")), run(beside("2048/128", tpot_s=bound_s))
    assert p99(held, "tpot_s") < 1.05 * bound_s < p99(free, "tpot_s")
    assert 0 < held.row_tokens_per_s < free.row_tokens_per_s


def test_a_live_request_takes_the_place_of_a_row() -> None:
    device = H100.model_copy(update={"max_num_seqs": 8})
    found = run(replace(beside("64/2000"), rate=0.5), device, counted=60)
    # A row takes 12 s.
    assert p99(found, "ttft_s") < 0.1


def test_rows_that_reserve_what_answers_have_been_run_in_greater_number() -> None:
    device = H100.model_copy(update={"kv_tokens": 40_000})
    usual, more = (run(beside("200/200:200"), device, overcommit=each) for each in (False, True))
    assert more.row_tokens_per_s > 1.3 * usual.row_tokens_per_s


@pytest.mark.long
def test_a_batch_that_needs_more_tokens_gets_more_replicas() -> None:
    goals = parse_goals("ttft_p99<0.3,tpot_p99<0.03")
    load = beside("512:256/128:64", ttft_s=0.285, tpot_s=0.0285)

    def plan(tokens: float, most: int = 4) -> int:
        assert load.batch is not None
        wanted = replace(load, batch=load.batch._replace(tokens_per_s=tokens))
        return Search(Trials(H100, wanted, goals), most).plan().answer.replicas

    assert plan(15_000) == 3
    with pytest.raises(NoPlanError, match=r"miss 15000 tokens/s for the batch: the best settings .* tok"):
        plan(15_000, most=2)
