"""The collector looks rarely at objects that live long, so that it holds up no request."""

import gc
import random
from collections.abc import Iterator

import pytest

from serve_app.system.garbage_collection import THRESHOLDS, collect_rarely

OBJECTS = 400  # of a request that is under way


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    """Begin with Python's own: another test may have changed them."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_collections_of_older_generations_become_rare_and_those_of_the_youngest_go_on() -> None:
    collect_rarely()
    assert gc.get_threshold() == THRESHOLDS
    before = [generation["collections"] for generation in gc.get_stats()]
    kept = [[number] for number in range(100 * THRESHOLDS[0])]
    after = [generation["collections"] for generation in gc.get_stats()]
    assert after[0] - before[0] > 50
    assert after[1] - before[1] <= 1
    assert len(kept) == 100 * THRESHOLDS[0]


def test_a_collection_of_the_youngest_doesnt_look_at_all_requests_under_way() -> None:
    """As many requests begin as end, at random: Python then sees few objects that are new."""
    collect_rarely()
    looked_at = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 0:
            looked_at.append(len(gc.get_objects(generation=0)))

    draw = random.Random(1)
    requests = [[[number] for number in range(OBJECTS)] for _ in range(200)]
    gc.collect()
    gc.callbacks.append(note)
    try:
        for _ in range(2_000):
            if draw.random() < 200 / (200 + len(requests)):
                requests.append([[number] for number in range(OBJECTS)])
            else:
                requests.pop(draw.randrange(len(requests)))
    finally:
        gc.callbacks.remove(note)
    assert len(looked_at) > 100
    assert max(looked_at) < 20 * OBJECTS  # of 200
