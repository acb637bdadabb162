"""The settings that follow from a load."""

from dataclasses import replace

from serve_app.tuning.goals import Goal, parse_goals
from serve_app.tuning.load import LoadLevel, LoadStep
from serve_app.tuning.service import LoadAnswer, ModelFacts
from serve_app.tuning.tuner import BACKGROUND_PART, MARGIN, NARROW_MARGIN, choose

FACTS = ModelFacts("m", 4096, 1, 100_000, 256, 0, 0)
GOALS = parse_goals("ttft_p99<0.5,tpot_p99<0.05")


def step(goals: tuple[Goal, ...] = GOALS, late: int = 0) -> LoadStep:
    """Return 20 requests per second of two seconds each, the last of which are late."""
    sent = [number / 20 for number in range(-100, 600)]
    found = [
        LoadAnswer(at, 101, at + (0.6 if n >= 700 - late else 0.2), at + 2.0) for n, at in enumerate(sent)
    ]
    return LoadStep.of(LoadLevel("open", 20.0), goals, found, (0.0, 30.0), began_at=-5.0, now=40.0)


def test_the_window_and_the_queue_follow_from_the_load_that_was_measured() -> None:
    choice = choose(step(), FACTS, GOALS)
    assert choice.rate == 20 * MARGIN
    # 40 in flight at each time.
    assert 40 <= choice.max_running <= 46
    assert choice.max_queue_size == 15
    assert choice.target_ongoing_requests == 38
    assert choice.goals == {"ttft_p99_s": 0.5, "tpot_p99_s": 0.05}


def test_a_load_that_holds_closely_has_a_wider_margin() -> None:
    # Six of the 600 requests may be late.
    assert choose(step(late=1), FACTS, GOALS).rate == 20 * MARGIN
    assert choose(step(late=2), FACTS, GOALS).rate == 20 * NARROW_MARGIN


def test_replicas_share_the_load_unevenly() -> None:
    choice = choose(step(), replace(FACTS, replicas=4), GOALS)
    assert 13 <= choice.max_running <= 15
    assert choice.max_queue_size == 8
    assert choice.target_ongoing_requests == 9


def test_the_window_is_not_larger_than_the_engine() -> None:
    assert choose(step(), replace(FACTS, max_num_seqs=16), GOALS).max_running == 16


def test_batch_work_gets_space_in_the_queue() -> None:
    assert choose(step(), FACTS, GOALS, beside_batch=True).max_queue_size == 15 * BACKGROUND_PART


def test_a_rate_of_the_user_is_kept() -> None:
    choice = choose(step(), FACTS, GOALS, rate=10.0)
    assert (choice.rate, choice.target_ongoing_requests) == (10.0, 20)


def test_without_a_bound_of_the_wait_the_queue_stays_as_it_is() -> None:
    goals = parse_goals("tpot_p99<0.05")
    choice = choose(step(goals), FACTS, goals)
    assert choice.max_queue_size is None
    assert choice.goals == {"tpot_p99_s": 0.05}
    assert choice.batcher == {"max_running": choice.max_running, "goals": choice.goals}
    goals = parse_goals("latency_p95<3")
    assert choose(step(goals), FACTS, goals).max_queue_size == 30
