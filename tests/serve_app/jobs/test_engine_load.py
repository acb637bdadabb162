import dataclasses
from typing import Any

import pytest

from batcher import BatchStats
from batcher.stats import ContinuousStats
from serve_app.api.protocol import JSON
from serve_app.jobs.pacing import EngineLoad, engine_load


def replica(**stats: Any) -> JSON:
    values = {"capacity": 1_000_000, "max_running": 64} | stats
    return {"replica": "a", "batcher": dataclasses.asdict(ContinuousStats(**values))}


@pytest.mark.parametrize(
    ("stats", "free"),
    [
        ({}, 64),
        ({"running": 10, "running_cost": 10}, 54),
        ({"running": 64, "running_cost": 64}, 0),
        # 20 records of 100 tokens fit.
        ({"running": 10, "running_cost": 1000, "capacity": 2000}, 10),
        ({"running": 3, "running_cost": 1000, "capacity": 1100}, 0),
        ({"running": 70, "running_cost": 70}, 0),
        ({"running": 10, "running_cost": 10, "queue_depth": 4}, 50),
        # Live traffic runs beside a background that fills the engine.
        ({"running": 10, "running_cost": 1200, "capacity": 1000}, 0),
    ],
)
def test_free_places_are_bounded_by_records_and_tokens(stats: JSON, free: int) -> None:
    assert engine_load([replica(**stats)]).free == free


def test_replicas_are_added_up() -> None:
    full = replica(running=64, running_cost=64, queue_depth=100)
    assert engine_load([full, replica(), replica(queue_depth=3)]) == EngineLoad(64, 103, 64 + 61)
    assert engine_load([]) == EngineLoad(0, 0, 0)


def test_the_places_of_a_function_are_not_known() -> None:
    batcher = {"replica": "b", "batcher": dataclasses.asdict(BatchStats(running=2, queue_depth=3))}
    assert engine_load([batcher, replica()]) == EngineLoad(2, 3, None)
