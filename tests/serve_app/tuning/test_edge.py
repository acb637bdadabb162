"""The search for the highest load, on a service whose edge is known."""

import random

import pytest

from serve_app.tuning.goals import parse_goals
from serve_app.tuning.load import LoadLevel, LoadStep
from serve_app.tuning.service import LoadAnswer
from serve_app.tuning.tuner import MOST_STEPS, RESOLUTION, Edge, EdgeSearch

GOALS = parse_goals("ttft_p90<1")


def step(value: float, misses: float) -> LoadStep:
    """Return a step of which a share of the requests is late."""
    found = [LoadAnswer(0.1 * n, 1, 0.1 * n + (2.0 if n < 100 * misses else 0.1)) for n in range(100)]
    for each in found:
        each.ended_at = each.first_at
    return LoadStep.of(LoadLevel("open", value), GOALS, found, (0.0, 10.0), began_at=0.0, now=20.0)


async def search(edge: float, start: float, noise: float = 0.0, **options: object) -> Edge:
    """Search for an edge; `noise` is the standard deviation of the load at which a step breaks."""
    numbers = random.Random(3)

    async def measure(value: float, early: bool) -> LoadStep:
        return step(value, 0.0 if value <= numbers.gauss(edge, noise * edge) else 1.0)

    options = {"least": 0.1, "most": 10_000.0} | options
    return await EdgeSearch(measure, **options).find(start)  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [1.0, 33.0, 70.0, 800.0])
async def test_the_edge_is_found_from_below_and_from_above(start: float) -> None:
    found = await search(70.0, start)
    assert found.held is not None
    assert found.broken is not None
    assert found.held.load.value <= 70.0 < found.broken.load.value
    assert found.broken.load.value <= found.held.load.value * (1 + RESOLUTION)
    # It is confirmed by a second step.
    assert found.held.sent == 200
    assert len(found.steps) <= 14


async def test_a_start_close_to_the_edge_takes_few_steps() -> None:
    found = await search(70.0, 65.0, growth=1.15)
    assert found.held is not None
    assert found.held.load.value == pytest.approx(70.0, rel=RESOLUTION)
    assert len(found.steps) <= 6


async def test_whole_numbers_end_where_there_is_none_between() -> None:
    found = await search(7.0, 1.0, whole=True, least=1)
    assert found.held is not None
    assert found.broken is not None
    assert (found.held.load.value, found.broken.load.value) == (7, 8)


async def test_nothing_holds() -> None:
    found = await search(0.01, 10.0)
    assert found.held is None
    assert found.broken is not None
    assert found.broken.load.value == 0.1


async def test_everything_holds() -> None:
    found = await search(1e9, 10.0, most=640.0)
    assert found.held is not None
    assert found.held.load.value == 640.0
    assert found.broken is None


async def test_the_step_that_confirms_takes_its_whole_time() -> None:
    early_steps: list[tuple[float, bool]] = []

    async def measure(value: float, early: bool) -> LoadStep:
        early_steps.append((value, early))
        return step(value, 0.0 if value <= 70 else 1.0)

    found = await EdgeSearch(measure, least=0.1, most=1_000.0).find(50.0)
    assert found.held is not None
    assert early_steps[-1] == (found.held.load.value, False)
    assert all(early for _, early in early_steps[:-1])


async def test_a_service_that_changes_at_random_ends_the_search() -> None:
    found = await search(70.0, 10.0, noise=0.3)
    assert len(found.steps) <= MOST_STEPS + 1


async def test_a_step_that_breaks_close_to_the_bound_is_repeated() -> None:
    seen: list[float] = []

    async def measure(value: float, early: bool) -> LoadStep:
        seen.append(value)
        return step(value, 0.0 if value < 60 else 0.12 if value < 80 else 1.0)

    found = await EdgeSearch(measure, least=0.1, most=1_000.0).find(50.0)
    assert found.held is not None
    assert found.held.load.value < 60
    close = [value for value in seen if 60 <= value < 80]
    assert close
    assert all(seen.count(value) == 2 for value in close)
