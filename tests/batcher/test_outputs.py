"""What is learned of the lengths of answers, and what a window reserves for those that run."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.outputs import (
    AHEAD,
    ENOUGH,
    LONGEST,
    MEMORY,
    MOST_GROUPS,
    Forecast,
    Outputs,
    bucket_of,
    start_of,
)
from batcher.window import Claim, Window

MOST = 1_000


def learned(lengths: Iterable[int], tenant: str = "a") -> Outputs:
    """Return what is known after answers that came one after the other."""
    outputs = Outputs()
    learn(outputs, lengths, tenant)
    return outputs


def learn(outputs: Outputs, lengths: Iterable[int], tenant: str = "a") -> None:
    for length in lengths:
        outputs.begin(tenant).end(length)


def mean(outputs: Outputs, tenant: str = "a", most: int = MOST) -> float:
    return outputs.foresee(tenant, most).mean


@given(st.integers(0, LONGEST))
def test_a_bucket_is_an_eighth_of_its_lengths_wide_at_most(tokens: int) -> None:
    start, end = start_of(bucket_of(tokens)), start_of(bucket_of(tokens) + 1)
    assert start <= tokens < end <= start + max(1, start / 8)


def test_before_enough_answers_have_ended_each_may_have_the_most() -> None:
    outputs = learned([10] * (ENOUGH - 1))
    assert outputs.foresee("a", MOST) == Forecast(MOST)
    learn(outputs, [10])
    assert 10 < mean(outputs) < 50
    learn(outputs, [10] * MEMORY)
    assert mean(outputs) == pytest.approx(10, abs=3)
    assert mean(outputs, most=5) == 5


def test_the_rest_of_an_answer_follows_from_what_it_has() -> None:
    outputs = learned(random.Random(1).choices(range(1, 201), k=4 * MEMORY))
    answer = outputs.begin("a")
    means = []
    for tokens in (20, 100, 150):
        assert answer.reach(tokens) > tokens
        means.append(answer.foresee(MOST).mean)
    assert means == pytest.approx([110, 150, 175], rel=0.1)
    # Half of those that have 100 have 50 more, and none has 128.
    answer = outputs.begin("a")
    answer.reach(100)
    alive = dict(zip(AHEAD, answer.foresee(MOST).alive, strict=True))
    assert alive[0] == 1
    assert alive[64] == pytest.approx(1 - 64 / 100, abs=0.15)
    assert alive[128] < 0.05
    assert alive[1024] == 0


def test_answers_that_still_run_count_as_far_as_they_are() -> None:
    """The first to end are the shortest: 40 of 240 end with ten tokens, the others have a hundred."""
    outputs = Outputs()
    answers = [outputs.begin("a") for _ in range(240)]
    for answer in answers[:40]:
        answer.end(10)
    for answer in answers[40:]:
        answer.reach(100)
    assert mean(outputs) > 0.8 * MOST


def test_an_answer_that_outgrows_all_that_was_seen_may_have_the_most() -> None:
    outputs = learned([10] * 500)
    answer = outputs.begin("a")
    answer.reach(9)
    assert answer.foresee(MOST).mean < 50
    before = mean(outputs)
    answer.reach(20)
    assert answer.foresee(MOST).mean == MOST
    # The others are thought to be longer at once.
    assert mean(outputs) > before


def test_an_answer_that_tells_no_tokens_is_as_long_as_those_that_are_met() -> None:
    outputs = learned([10, 190] * MEMORY)
    answer = outputs.begin("a")
    # Of a hundred tokens that are made, 95 are of long answers.
    assert answer.foresee(MOST).mean == pytest.approx(0.05 * 10 + 0.95 * 190, rel=0.1)
    assert mean(outputs) == pytest.approx(100, rel=0.1)
    answer.reach(1)
    assert answer.foresee(MOST).mean == pytest.approx(100, rel=0.1)


def test_what_is_learned_follows_a_change() -> None:
    outputs = learned([100] * 20 * MEMORY)
    assert mean(outputs) == pytest.approx(100, rel=0.1)
    learn(outputs, [500] * 3 * MEMORY)
    assert mean(outputs) == pytest.approx(480, rel=0.1)


def test_each_tenant_has_its_own_lengths_and_a_new_one_those_of_all() -> None:
    outputs = Outputs()
    for _ in range(2 * MEMORY):
        learn(outputs, [20], "short")
        learn(outputs, [400], "long")
    assert [mean(outputs, each) for each in ("short", "long", "new")] == pytest.approx(
        [20, 400, 210], rel=0.15
    )
    learn(outputs, [400] * (ENOUGH - 1), "new")
    assert mean(outputs, "new") < 300
    learn(outputs, [400] * MEMORY, "new")
    assert mean(outputs, "new") == pytest.approx(400, rel=0.1)


def test_few_tenants_are_remembered() -> None:
    outputs = Outputs()
    learn(outputs, [20] * 2 * MEMORY, "early")
    learn(outputs, [20] * 2 * MEMORY, "kept")
    for number in range(MOST_GROUPS - 1):
        learn(outputs, [400] * 10, f"tenant {number}")
        learn(outputs, [20], "kept")
    assert mean(outputs, "kept") == pytest.approx(20, rel=0.2)
    assert mean(outputs, "early") > 100


# The window

FORECASTS = st.one_of(
    st.builds(lambda mean: Forecast(mean), st.integers(0, 100)),
    st.builds(lambda mean, variance: Forecast(mean, variance), st.integers(0, 100), st.floats(0, 1_000)),
    st.builds(
        lambda mean, alive: Forecast(mean, 10.0, tuple(sorted(alive, reverse=True))),
        st.integers(0, 100),
        st.lists(st.floats(0, 1), min_size=len(AHEAD), max_size=len(AHEAD)),
    ),
)
CLAIMS = st.builds(
    Claim.of, FORECASTS, st.integers(0, 50), st.integers(1, 3), st.integers(0, 80), st.just(100)
)


@given(st.lists(CLAIMS), CLAIMS, st.integers(1, 5_000), st.integers(0, 10))
def test_what_fits_with_the_most_fits_always(
    running: list[Claim], claim: Claim, capacity: int, preempted: int
) -> None:
    window = Window()
    window.capacity, window.most_records = capacity, 1_000
    none = Claim(0, 0)
    for each in running:
        window.background.records += 1
        window.background.claim(each, none)
    if preempted:
        window.overcommitted(preempted, 0.0)
    most = sum(each.most for each in (*running, claim))
    if most <= capacity or not running:
        assert window.fits(1, claim, True, 0.0)
    assert window.left(True, 0.0)[1] >= capacity - sum(each.most for each in running)
    for each in running:
        window.background.claim(none, each)
    assert window.left(True, 0.0) == (1_000 - len(running), capacity)


def test_the_sum_counts_and_not_each_claim() -> None:
    """A hundred records take 10 or 110 each, with even chances: 60 on average, 71.6 in 99 of 100 cases."""
    window = Window()
    window.most_records = 1_000
    claim = Claim.of(Forecast(50.0, 2_500.0), 10, 1, 0, 100)
    assert (claim.cost, claim.most) == (60, 110)
    for _ in range(99):
        window.background.records += 1
        window.background.claim(claim, Claim(0, 0))
    for capacity, fits in ((7_164, False), (7_166, True)):
        window.capacity = capacity
        assert window.fits(1, claim, True, 0.0) is fits


def test_after_a_preemption_the_window_is_cautious_for_some_minutes() -> None:
    window = Window()
    window.capacity, window.most_records = 10_000, 1_000
    for _ in range(100):
        window.background.records += 1
        window.background.claim(Claim.of(Forecast(50.0, 100.0), 10, 1, 0, 100), Claim(0, 0))
    free = [window.left(True, 0.0)[1]]
    window.overcommitted(1, 0.0)
    free.append(window.left(True, 0.0)[1])
    window.overcommitted(25, 0.0)
    free.append(window.left(True, 0.0)[1])
    # A preemption of few costs a little; of a quarter, all that was overcommitted.
    assert free[0] > free[1] > 0.9 * free[0]
    assert free[2] == 10_000 - 100 * 110
    assert [window.left(True, seconds)[1] > 0 for seconds in (0.0, 60.0, 180.0)] == [False, True, True]
    assert window.left(True, 1_000.0)[1] == pytest.approx(free[0], rel=0.01)


def test_a_preemption_by_the_foreground_is_no_wrong_estimate() -> None:
    window = Window()
    window.capacity, window.most_records = 10_000, 1_000
    window.background.records = 100
    window.background.claim(Claim(6_000, 11_000, (6_000.0,) * len(AHEAD), (0.0,) * len(AHEAD)), Claim(0, 0))
    window.foreground.records = 1
    window.foreground.claim(Claim(5_000, 5_000), Claim(0, 0))
    window.overcommitted(100, 0.0)
    assert window.left(True, 0.0)[1] == -1_000
    window.foreground.claim(Claim(0, 0), Claim(5_000, 5_000))
    window.overcommitted(100, 0.0)
    assert window.left(True, 0.0)[1] == -1_000
    assert window.left(True, 600.0)[1] == pytest.approx(4_000, rel=0.01)
