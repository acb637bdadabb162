"""Steps under a load and the result of a tuning, made by hand."""

from serve_app.tuning.goals import Goal, parse_goals
from serve_app.tuning.load import LoadLevel, LoadStep, Loop
from serve_app.tuning.service import LoadAnswer
from serve_app.tuning.tune_report import Tuning
from serve_app.tuning.tuner import Edge, TunedSettings

GOALS = parse_goals("ttft_p99<0.5,latency_p95<3")


def step(
    value: float,
    ttft: float = 0.2,
    loop: Loop = "open",
    failed: bool = False,
    goals: tuple[Goal, ...] = GOALS,
) -> LoadStep:
    """Return ten seconds with so many requests per second, each of two seconds."""
    sent = [number / value for number in range(int(10 * value))]
    found = [LoadAnswer(at, 11, at + ttft, at + 2.0, failed) for at in sent]
    return LoadStep.of(LoadLevel(loop, value), goals, found, (0.0, 10.0), began_at=0.0, now=20.0)


def tuning() -> Tuning:
    """Return a result: 20 requests per second hold the goals, and 21 don't."""
    held, broken = step(20.0), step(21.0, ttft=0.7)
    edge = Edge(held, broken, (held, broken), (held, broken))
    return Tuning(
        "m",
        "512 tokens in, 128 out",
        GOALS,
        lone=step(1.0, loop="closed"),
        open=edge,
        choice=TunedSettings(19.0, 40, 15, 38, {"ttft_p99_s": 0.5}),
    )
