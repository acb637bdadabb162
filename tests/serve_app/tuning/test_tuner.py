"""The search for the highest load, and the settings and words for it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.tuning.goals import parse_goals
from serve_app.tuning.load import LoadPoint
from serve_app.tuning.tuner import TunedSettings, search
from tests.serve_app.tuning.loads import GOALS, point, tuning


async def found(edge: float, held: float, *, whole: bool) -> list[LoadPoint]:
    """Return the loads of a search on a service that holds its goals up to an edge."""
    points = []

    async def measure(value: float) -> LoadPoint:
        points.append(point(value, ttft=0.2 if value <= edge else 0.7))
        return points[-1]

    await search(measure, GOALS, held=held, whole=whole)
    return points


@given(st.integers(1, 4_000))
async def test_the_edge_of_clients_is_found_in_few_loads(edge: int) -> None:
    points = await found(edge, 1.0, whole=True)
    best = tuning(point(1), *points).best
    assert best is not None
    broken = min(each.value for each in points if each.misses(GOALS))
    assert best.value <= edge < broken <= max(best.value + 1, best.value / 0.9)
    assert all(each.value == int(each.value) for each in points)
    assert len(points) <= 17
    assert len({each.value for each in points}) == len(points)


@given(st.floats(0.011, 5_000), st.floats(0.01, 10))
async def test_the_edge_of_a_rate_is_found_above_a_lone_client(edge: float, lone: float) -> None:
    points = await found(max(edge, lone), lone, whole=False)
    best = tuning(point(lone), *points).best
    assert best is not None
    broken = min(each.value for each in points if each.misses(GOALS))
    assert broken - best.value <= 0.1 * broken
    assert len(points) <= 24


async def test_a_service_that_holds_every_load_ends_the_search() -> None:
    points = await found(1e9, 1.0, whole=True)
    assert points[-1].value == 4_096
    assert len(await found(1e9, 1.0, whole=False)) == 24


def test_a_load_above_one_that_breaks_is_no_answer() -> None:
    found = tuning(point(1), point(8, ttft=0.7), point(16))
    assert found.best == point(1)


def test_a_load_breaks_where_more_than_one_percent_fails() -> None:
    assert point(8, completed=990, failed=10).misses(GOALS) == ()
    assert point(8, completed=980, failed=11).misses(GOALS) == ("errors",)
    assert point(8, completed=0, failed=0).misses(GOALS) == ("errors",)


def test_settings_come_from_the_load_by_littles_law() -> None:
    def chosen(load: float, goals: str, replicas: int = 1) -> TunedSettings:
        found = tuning(point(load))
        found.goals, found.replicas = parse_goals(goals), replicas
        assert found.settings is not None
        return found.settings

    settings = chosen(40, "ttft_p99<0.5,tpot_p99<0.05", replicas=2)
    # 20 requests/s, of which 10 in half a second: five of each replica, times 1.5.
    assert settings.max_queue_size == 8
    assert settings.target_ongoing_requests == 18
    assert settings.goals == {"ttft_p99_s": 0.5, "tpot_p99_s": 0.05}
    assert chosen(400, "ttft_p50<0.5").batcher == {"max_queue_size": 150}
    assert chosen(400, "tpot_p99<0.5").batcher == {"goals": {"tpot_p99_s": 0.5}}
    # An answer takes 2 s of the 3.5 s.
    assert chosen(400, "latency_p95<3.5").max_queue_size == 450


def test_the_text_has_the_loads_and_the_settings() -> None:
    found = tuning()
    found.applied = point(16, ttft=0.7)
    assert found.text() == TEXT
    assert not found.holds


def test_the_text_says_why_no_load_holds() -> None:
    found = tuning(point(1, ttft=0.7, completed=290, failed=10, error="Too Many Requests"))
    assert not found.holds
    assert (
        "No load holds: at 1 client, ttft_p99 is 700 ms and 10 of 300 requests failed (Too Many Requests)\n"
        in (found.text())
    )


def test_the_json_has_every_load_and_the_settings() -> None:
    read = json.loads(json.dumps(tuning().body(), allow_nan=False))
    assert [load["load"] for load in read["loads"]] == [1, 16, 32, 17]
    assert (read["highest"]["load"], read["applied"]) == (16, None)
    assert read["settings"] == {
        "batcher": {"max_queue_size": 8, "goals": {"ttft_p99_s": 0.5}},
        "target_ongoing_requests": 14,
    }


@pytest.mark.parametrize(("completed", "small"), [(299, True), (300, False)])
def test_a_percentile_needs_answers(completed: int, small: bool) -> None:
    assert point(8, completed=completed).is_small(GOALS) is small


TEXT = """\
m: 512 tokens in, 128 out; ttft_p99<0.5, latency_p95<10

   load        TTFT p50  TTFT p99  TPOT p50  TPOT p99  LATENCY p95  req/s  tok/s  in flight  answers
   1 client      200 ms    200 ms   20.0 ms   30.0 ms       3.00 s    0.5     64          1      300  holds
▶  16 clients    200 ms    200 ms   20.0 ms   30.0 ms       3.00 s      8  1,024         16      300  holds
   17 clients    700 ms    700 ms   20.0 ms   30.0 ms       3.00 s    8.5  1,088         17      300  ttft_p99
   32 clients    2.00 s    2.00 s   20.0 ms   30.0 ms       3.00 s     16  2,048         32      300  ttft_p99

highest load that holds: 16 clients, 8 requests/s, 1,024 tokens/s. Settings for it, in deployments:
- name: "Engine:m"
  user_config:
    batcher:
      max_queue_size: 8
      goals:
        ttft_p99_s: 0.5
  # with autoscaling_config: target_ongoing_requests: 14 per replica

with these settings the goals don't hold: at 16 clients, ttft_p99 is 700 ms
"""
