"""The measurement of a device, on an engine in virtual time."""

from typing import Any

import pytest

from serve_app.client import ServiceError
from serve_app.tuning.profiling import PARAMETERS, Measurement, fit, step_of
from serve_app.tuning.service import LoadAnswer, Service
from tests.serve_app.tuning.doubles import VirtualEngine, profile


async def measured(engine: VirtualEngine, step_tokens: int = 2048) -> Measurement:
    """Measure an engine; its clock is the engine's."""

    async def wait(seconds: float) -> None:
        engine.now += seconds

    async with Service("http://virtual", clock=lambda: engine.now, transport=engine) as service:
        measurement = Measurement(service, await service.facts("m"), step_tokens, sleep=wait)
        await measurement.run()
    return measurement


@pytest.mark.parametrize(
    "numbers",
    [
        {"request_ms": 6.0},
        {
            "base_ms": 51.0,
            "per_prefill_token_ms": 0.25,
            "per_sequence_ms": 0.01,
            "per_kv_token_ms": 0.00019,
            "kv_tokens": 94_000,
            "request_ms": 3.0,
        },
    ],
    ids=["numbers", "l4-7b"],
)
async def test_the_parameters_of_an_engine_come_back(numbers: dict[str, Any]) -> None:
    engine = VirtualEngine(profile(**numbers))
    measurement = await measured(engine)
    found = fit(measurement.observations)
    expected = {name: getattr(engine.device, name) for name in PARAMETERS}
    for name in ("base_ms", "per_prefill_token_ms", "per_kv_token_ms"):
        assert found.parameters[name] == pytest.approx(expected[name], rel=0.02), name
    assert found.parameters["per_sequence_ms"] == pytest.approx(expected["per_sequence_ms"], abs=0.005)
    assert found.parameters["request_ms"] == pytest.approx(expected["request_ms"], abs=0.1)
    assert not found.bad
    assert measurement.warnings == []
    assert engine.now < 90, "it takes more than a minute"


async def test_no_prompt_is_sent_twice_and_the_load_is_bounded() -> None:
    engine = VirtualEngine(profile())
    await measured(engine)
    beginnings = {tuple(body["prompt"][:32]) for body in engine.bodies}
    assert len(beginnings) == len(engine.bodies)
    assert len(engine.bodies) < 600
    assert all(body["ignore_eos"] and body["stream"] for body in engine.bodies)
    longest = max(len(body["prompt"]) + body["max_tokens"] for body in engine.bodies)
    assert longest <= engine.device.max_model_len


async def test_a_small_cache_and_a_short_context_are_kept_to() -> None:
    engine = VirtualEngine(profile(kv_tokens=4_000, max_model_len=1_000, max_num_seqs=5))
    measurement = await measured(engine)
    assert max(each.sequences for each in measurement.observations) == 5
    assert max(len(body["prompt"]) + body["max_tokens"] for body in engine.bodies) <= 1_000
    assert not fit(measurement.observations).bad


async def test_prompts_are_no_longer_than_a_step() -> None:
    engine = VirtualEngine(profile(max_num_batched_tokens=512))
    measurement = await measured(engine, 512)
    assert max(each.prefill_tokens for each in measurement.observations) == 512
    assert not fit(measurement.observations).bad


async def test_a_noisy_engine_is_told() -> None:
    engine = VirtualEngine(profile(), noise=(1.0, 1.4, 2.2))
    measurement = await measured(engine)
    assert any("the times differ by a factor of" in warning for warning in measurement.warnings)


async def test_a_point_beside_requests_of_others_is_measured_again() -> None:
    quiet, engine = VirtualEngine(profile()), VirtualEngine(profile())
    await measured(quiet)
    engine.others, engine.others_after = 7, 2
    measurement = await measured(engine)
    assert measurement.warnings == []
    # The point beside which they ran was measured again.
    assert len(engine.bodies) > len(quiet.bodies)


async def test_a_slow_engine_leaves_points_out() -> None:
    engine = VirtualEngine(profile(base_ms=2_000.0))
    measurement = await measured(engine)
    assert any("points were left out" in warning for warning in measurement.warnings)
    assert engine.now < 600


async def test_a_busy_engine_is_refused() -> None:
    engine = VirtualEngine(profile())
    engine.facts = {"running": 3, "queue_depth": 1}
    with pytest.raises(ServiceError, match="4 requests run or wait on m; measure a service without other"):
        await measured(engine)
    assert engine.bodies == []


async def test_several_replicas_are_refused() -> None:
    engine = VirtualEngine(profile())
    engine.replicas = 2
    with pytest.raises(ServiceError, match="m has 2 replicas"):
        await measured(engine)


def test_answers_that_follow_each_other_are_no_step() -> None:
    first = LoadAnswer(0.0, 49, pieces=[(n / 10, n) for n in range(1, 50)])
    second = LoadAnswer(0.0, 49, pieces=[(4.5 + n / 10, n) for n in range(1, 50)])
    assert step_of([first, second], 10) is None


def test_pieces_of_several_tokens_count_as_many() -> None:
    answer = LoadAnswer(0.0, 77, pieces=[(1.0, 1), *((1.0 + n * 0.02, 1 + n) for n in range(4, 80, 4))])
    found = step_of([answer], 100)
    assert found is not None
    assert found.milliseconds == pytest.approx(20.0)
    assert (found.sequences, found.kv_tokens) == (1, 100 + 38.5)
