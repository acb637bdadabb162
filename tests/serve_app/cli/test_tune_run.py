"""A run of a tuning, on a service whose load steps take no time."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click
import pytest

from serve_app.api.protocol import JSON
from serve_app.cli import tune_run
from serve_app.cli.dashboard import Dashboard
from serve_app.cli.tune_config import RunningConfig
from serve_app.cli.tune_run import STEPS_DOWN
from serve_app.client import ServiceError
from serve_app.tuning.load import LoadLevel, LoadStep
from serve_app.tuning.service import ModelFacts
from serve_app.tuning.tuner import MARGIN, LoneMissError
from serve_app.wire.usage import Tokens
from tests.progress import STILL_S
from tests.serve_app.cli.instant_load import QUESTION, Bench


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes between two looks at the service."""
    monkeypatch.setattr(tune_run, "IDLE_S", 0.0)


@pytest.mark.parametrize(
    ("loop", "found"), [("both", (20, 20)), ("open", (20, None)), ("closed", (None, 20))]
)
async def test_a_loop_has_its_highest_load(loop: str, found: tuple[float | None, float | None]) -> None:
    tuning = await Bench().found(loop=loop)
    edges = tuning.open, tuning.closed
    for edge, value in zip(edges, found, strict=True):
        assert (edge is None) is (value is None)
        assert edge is None or edge.held.load.value == pytest.approx(value, rel=0.05)
    # Settings follow from a rate.
    assert (tuning.choice is None) is (loop == "closed")
    assert tuning.model == "m"
    assert tuning.lone.load == ("closed", 1)
    assert tuning.warnings == ()


async def test_given_loads_are_measured_in_place_of_the_highest() -> None:
    bench = Bench()
    tuning = await bench.found(rate=15.0, concurrency=30)
    assert [(each.load, each.holds) for each in tuning.single] == [
        (("closed", 30), False),
        (("open", 15.0), True),
    ]
    assert tuning.choice.rate == 15.0
    assert (tuning.open, tuning.closed) == (None, None)
    assert (await Bench(limit=10).found(rate=15.0)).choice is None


async def test_requests_of_others_before_the_load_are_told_if_they_stay() -> None:
    busy = Bench(facts=lambda facts: replace(facts, in_flight=3))
    (warning,) = (await busy.found(rate=10.0)).warnings
    assert warning.startswith("3 other requests run or wait; ")
    in_flight = iter([3, 1])
    leaving = Bench(facts=lambda facts: replace(facts, in_flight=next(in_flight, 0)))
    assert (await leaving.found(rate=10.0)).warnings == ()


@pytest.mark.parametrize(("others", "told"), [(357, []), (358, ["8 other requests ran during the steps"])])
async def test_requests_of_others_during_the_load_are_told_if_they_are_many(
    others: int, told: list[str]
) -> None:
    # The generator has sent 350 of them.
    bench = Bench(sent=350)
    bench.engine.others = others
    warnings = (await bench.found(rate=10.0)).warnings
    assert [warning.partition(",")[0] for warning in warnings] == told


async def test_another_number_of_replicas_is_told() -> None:
    bench = Bench()
    looks = iter([1])
    bench.facts = lambda facts: replace(facts, replicas=next(looks, 3), submitted=0)
    (warning,) = (await bench.found(rate=10.0)).warnings
    assert warning.startswith("the model had 1 replicas at first and has 3 now: measure with a fixed number")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda step: replace(step, late_s=0.25),
            "requests were sent up to 0.25 s late: this machine is too",
        ),
        (lambda step: replace(step, sent=5), "steps had too few requests for the percentiles"),
        (lambda step: replace(step, peak=58), "max_running, now 64, may bound the load"),
    ],
)
async def test_figures_that_are_doubtful_are_told(change: Callable[[LoadStep], LoadStep], said: str) -> None:
    (warning,) = (await Bench(change=change).found(rate=10.0)).warnings
    assert warning.startswith(said)


async def test_warnings_of_a_run_that_fails_are_kept() -> None:
    """They are why a lone request misses a goal that it would hold in an idle service."""
    bench = Bench(limit=0, facts=lambda facts: replace(facts, in_flight=3))
    run = bench.run(rate=10.0)
    with pytest.raises(LoneMissError):
        await run.run()
    (warning,) = run.found.warnings
    assert warning.startswith("3 other requests run or wait; ")


async def test_a_service_that_goes_away_leaves_what_was_found() -> None:
    bench = Bench(refused=(LoadLevel("open", 10.0),))
    run = bench.run(rate=10.0, concurrency=4)
    with pytest.raises(ServiceError, match="the service is gone"):
        await run.run()
    assert run.found.lone is not None
    assert [each.load for each in run.found.single] == [("closed", 4)]
    assert bench.closed == 1


async def test_a_service_that_goes_away_after_the_load_loses_nothing() -> None:
    looks = 0

    def facts(facts: ModelFacts) -> ModelFacts:
        nonlocal looks
        looks += 1
        if looks > 1:
            raise ServiceError("gone")
        return facts

    assert (await Bench(facts=facts).found(rate=10.0)).choice.rate == 10.0


async def test_a_run_that_is_cancelled_ends_the_load_and_keeps_what_was_found() -> None:
    bench = Bench(stuck=asyncio.Event())
    run = bench.run()
    task = asyncio.create_task(run.run())
    assert bench.stuck
    await asyncio.wait_for(bench.stuck.wait(), STILL_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert run.found.lone is not None
    assert bench.closed == 1


# Settings that are applied


class Deploys(Dashboard):
    """Stands for Ray's dashboard; a deployed config takes effect at once, and lowers the limit."""

    def __init__(self, bench: Bench, limit: float) -> None:
        super().__init__(8000)
        self.deployed: list[JSON] = []
        self._bench = bench
        self._limit = limit

    def config(self) -> JSON:
        model = {"id": "m", "source": "org/m"}
        scaling = {"name": "Engine:m", "autoscaling_config": {"max_replicas": 4}}
        return {"applications": [{"name": "llm", "args": {"models": [model]}, "deployments": [scaling]}]}

    def applications(self) -> JSON:
        return {}

    def deploy(self, config: JSON) -> str:
        (engine,) = config["applications"][0]["deployments"]
        self.deployed.append(engine)
        self._bench.engine.facts["max_running"] = engine["user_config"]["batcher"]["max_running"]
        self._bench.limit = self._limit
        return ""


async def applied(bench: Bench, limit: float) -> tuple[Any, list[JSON]]:
    """Return what is found with settings that lower the limit, and the deployments."""
    dashboard = Deploys(bench, limit)
    run = bench.run(RunningConfig("http://localhost:8000", dashboard), rate=20.0)
    await run.run()
    return run.found, dashboard.deployed


async def test_the_rate_is_lowered_until_the_goals_hold_with_the_settings() -> None:
    tuning, deployed = await applied(Bench(), limit=18.5)
    rates = [each.load.value for each in tuning.applied]
    assert rates == pytest.approx([20.0, 19.0, 18.05])
    assert [each.holds for each in tuning.applied] == [False, False, True]
    assert tuning.choice.rate == rates[-1]
    targets = [each["autoscaling_config"]["target_ongoing_requests"] for each in deployed]
    assert targets == [targets[0], round(round(targets[0] * MARGIN) * MARGIN)]
    assert tuning.choice.target_ongoing_requests == targets[-1]


async def test_settings_that_hold_are_applied_once() -> None:
    tuning, deployed = await applied(Bench(), limit=20)
    assert ([each.load.value for each in tuning.applied], len(deployed)) == ([20.0], 1)


async def test_settings_that_never_hold_stay_those_of_the_rate() -> None:
    tuning, deployed = await applied(Bench(), limit=1)
    assert len(tuning.applied) == STEPS_DOWN + 1
    assert tuning.applied[-1].load.value == pytest.approx(20 * MARGIN**STEPS_DOWN)
    assert (tuning.choice.rate, len(deployed)) == (20.0, 1)


# Batch work beside live traffic


async def test_batch_work_fills_every_place_twice_while_live_traffic_is_measured() -> None:
    bench = Bench()
    bench.engine.replicas = 2
    tuning = await bench.found(rate=10.0, beside_batch=True)
    assert bench.clients == [2 * 2 * 64]
    assert bench.loads[-1] == (("open", 10.0), "default")
    assert tuning.batch.live.holds
    # The rate is measured beside batch work alone.
    assert [load for load, _ in bench.loads].count(LoadLevel("open", 10.0)) == 1
    assert tuning.single == ()
    assert bench.closed == 2


async def test_a_lone_request_without_an_answer_does_not_stop_the_clock() -> None:
    """A step whose warm-up is no number would never end."""
    nothing: dict[Any, list[float]] = {"ttft": [], "tpot": [], "latency": []}
    bench = Bench(change=lambda step: replace(step, samples=nothing) if step.load.value == 1 else step)
    tuning = await bench.found(rate=10.0, beside_batch=True)
    assert bench.warm_ups[-1] >= 0
    assert tuning.batch.live.holds


# Questions


def ledger(**tokens: tuple[int, int, int]) -> dict[str, list[Tokens]]:
    """Return the calls of models, one each."""
    return {model: [Tokens(*one)] for model, one in tokens.items()}


async def test_the_lengths_of_a_ledger_are_told_once_they_are_known() -> None:
    run = Bench().run(rate=10.0, ledger=ledger(m=(2_000, 500, 70)))
    assert run.found.requests == "lengths of calls in the ledger"
    await run.run()
    assert run.found.requests == (
        "lengths of 1 calls in the ledger, on average 2000 tokens in (25% from the prefix cache), 70 out"
    )


@pytest.mark.parametrize(("calls", "models"), [({}, "none"), ({"b": (1, 0, 1), "a": (1, 0, 1)}, "a, b")])
def test_a_ledger_without_calls_of_the_model_names_those_that_it_has(
    calls: dict[str, tuple[int, int, int]], models: str
) -> None:
    question = replace(QUESTION, ledger=ledger(**calls))
    with pytest.raises(
        click.UsageError, match=rf"no answered call of m in this time \(.* calls: {models}\); use"
    ):
        question.requests("m")


def test_a_question_says_what_is_sent() -> None:
    assert str(QUESTION) == "512 tokens in, 128 out"
    prompts = ["a"] * 1_234
    assert str(replace(QUESTION, prompts=prompts)) == (
        "1,234 prompts of a dataset, answers of at most 128 tokens"
    )
