"""Loads as they are measured, for the tests."""

import sys
from pathlib import Path
from typing import Any

from serve_app.tuning.goals import parse_goals
from serve_app.tuning.load import LoadPoint
from serve_app.tuning.tuner import Tuning

SCRIPTED = (sys.executable, str(Path(__file__).with_name("scripted_bench.py")))
"""The command of a child that answers as vLLM's benchmark does."""

GOALS = parse_goals("ttft_p99<0.5,latency_p95<10")


def point(value: float, ttft: float = 0.2, **fields: Any) -> LoadPoint:
    """Return a load of as many requests in flight as its value, each of which takes two seconds."""
    seconds = {"ttft_p50": ttft, "ttft_p99": ttft, "tpot_p50": 0.02, "tpot_p99": 0.03, "latency_p95": 3.0}
    given: dict[str, Any] = {"completed": 300, "failed": 0, "rate": value / 2, "tokens_per_s": 64 * value}
    return LoadPoint(value=value, in_flight=value, seconds=seconds, **(given | fields))


def tuning(*points: LoadPoint) -> Tuning:
    """Return a tuning with these loads; none: 16 clients hold, and 17 and 32 break."""
    found = list(points) or [point(1), point(16), point(32, ttft=2.0), point(17, ttft=0.7)]
    return Tuning("m", "512 tokens in, 128 out", GOALS, "concurrency", found)
