"""TokenBatcher, and code that was written for the library that it can stand in for."""

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from batcher import BatchStats, CostEstimator, DynamicBatcher, Prompt, TokenBatcher, TokenEstimator
from tests.batcher.virtual import now, virtual
from tests.progress import STILL_S


async def upper(batch: list[Any]) -> list[str]:
    return [str(getattr(record, "text", record)).upper() for record in batch]


class Both:
    def estimate_tokens(self) -> int:
        return 5

    def estimate_cost(self) -> int:
        return 50


class CostOnly:
    def estimate_cost(self) -> int:
        return 50


async def tokens_of(record: Any, submit: dict[str, Any] | None = None, **settings: Any) -> int:
    async with TokenBatcher[Any, str](upper, clock=now, **settings) as batcher:
        await (await batcher.submit(record, **(submit or {})))
        batcher.submit_nowait(record, **(submit or {}))
    return batcher.stats.total_batch_cost // 2


@virtual
async def test_tokens_are_given_or_estimated_or_known_by_the_record_or_the_default() -> None:
    seven: dict[str, Any] = {"token_estimator": lambda record: 7, "cost_estimator": lambda record: 8}
    assert await tokens_of(Both(), {"estimated_tokens": 9, "estimated_cost": 10}, **seven) == 9
    assert await tokens_of(Both(), {"estimated_cost": 10}, **seven) == 10
    assert await tokens_of(Both(), **seven) == 7
    assert await tokens_of(Both(), cost_estimator=lambda record: 8) == 8
    assert await tokens_of(Both()) == 5
    assert await tokens_of(CostOnly()) == 50
    assert await tokens_of("x", default_token_estimate=3, default_cost=4) == 3
    assert await tokens_of("x", default_cost=4) == 4
    assert await tokens_of("x") == 1


@virtual
async def test_the_token_budget_goes_before_the_cost_budget() -> None:
    sizes = []

    async def process(batch: list[int]) -> list[int]:
        sizes.append(len(batch))
        return batch

    budgets: list[dict[str, Any]] = [
        {"target_batch_tokens": 20, "target_batch_cost": 40},
        {"target_batch_cost": 40},
    ]
    for settings in budgets:
        async with TokenBatcher(process_fn=process, default_cost=10, clock=now, **settings) as batcher:
            await asyncio.gather(*(await batcher.submit_batch(range(4))))
    assert sizes == [2, 2, 4]


def test_a_function_is_needed() -> None:
    with pytest.raises(TypeError, match="TokenBatcher requires either inference_fn or process_fn"):
        TokenBatcher[Any, Any]()
    with pytest.raises(TypeError, match="process_fn must be a function or another callable, not 1"):
        TokenBatcher(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_batch"):
        TokenBatcher(upper, max_batch=3)  # type: ignore[call-arg]


def test_the_documented_names_are_there() -> None:
    documented = (
        "inference_fn process_fn token_estimator cost_estimator target_batch_tokens target_batch_cost "
        "default_token_estimate default_cost max_batch_size min_batch_size batch_timeout_s max_queue_size "
        "prefetch_batches"
    )
    options = {*inspect.signature(TokenBatcher).parameters, *inspect.signature(DynamicBatcher).parameters}
    assert set(documented.split()) <= options
    for name in ("start", "stop", "submit", "submit_batch", "is_running", "stats", "__aenter__", "__aexit__"):
        assert hasattr(TokenBatcher, name)
    figures = (
        "utilization total_submitted total_completed total_batches total_batch_cost avg_batch_size "
        "avg_batch_cost busy_time_s idle_time_s"
    )
    for name in figures.split():
        assert getattr(BatchStats(), name) == 0


def test_protocols_can_be_asked_for() -> None:
    assert isinstance(Prompt("x"), TokenEstimator)
    assert isinstance(CostOnly(), CostEstimator)
    assert not isinstance(Prompt("x"), CostEstimator)


def test_a_prompt_estimates_its_tokens() -> None:
    assert Prompt("").estimate_tokens() == 1
    assert Prompt(text="a" * 40).estimate_tokens() == 11


# Programs in the way of the documentation, with the import changed


async def test_a_worker_that_lives_as_long_as_its_process() -> None:
    @dataclass
    class Question:
        task_id: str
        index: int
        text: str

        def estimate_tokens(self) -> int:
            return len(self.text) // 4 + 1

    async def inference(batch: list[Question]) -> list[str]:
        return [f"{question.task_id}/{question.index}: {question.text}" for question in batch]

    batcher = TokenBatcher[Question, str](
        inference_fn=inference, target_batch_tokens=32_000, batch_timeout_s=0.05, max_queue_size=5_000
    )
    await batcher.start()

    async def task(task_id: str, texts: Sequence[str]) -> list[str]:
        futures = [await batcher.submit(Question(task_id, i, text)) for i, text in enumerate(texts)]
        return await asyncio.gather(*futures)

    async with asyncio.timeout(STILL_S):
        answers = await asyncio.gather(*(task(f"t{i}", ["a", "b"]) for i in range(10)))
    assert answers[3] == ["t3/0: a", "t3/1: b"]
    await batcher.stop()
    stats = batcher.stats
    assert (stats.total_submitted, stats.total_completed) == (20, 20)
    assert "Utilization" in f"Utilization: {stats.utilization:.1%}, {stats.avg_batch_size:.1f} per batch"


async def test_costs_and_batches_in_bulk() -> None:
    async def process(batch: list[dict[str, int]]) -> list[int]:
        return [item["value"] * 2 for item in batch]

    async with DynamicBatcher(
        process_fn=process,
        target_batch_cost=1000,
        max_batch_size=64,
        batch_timeout_s=0.05,
        max_queue_size=5_000,
    ) as batcher:
        async with asyncio.timeout(STILL_S):
            futures = []
            for value in range(100):
                futures.append(await batcher.submit({"value": value}, estimated_cost=10))
            assert sum(await asyncio.gather(*futures)) == 9900
            more = await batcher.submit_batch([{"value": 1}, {"value": 2}], estimated_cost=[1, 1])
            assert [await future for future in more] == [2, 4]
