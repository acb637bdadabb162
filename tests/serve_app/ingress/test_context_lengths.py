import asyncio
from collections.abc import Sequence

import pytest

from serve_app.api.protocol import JSON
from serve_app.ingress.context_lengths import ContextLengths
from serve_app.ingress.routing import Routing
from serve_app.settings.schema import parse
from tests.batcher.virtual import until

MODELS = {
    "models": [
        {"id": "llm", "source": "x"},
        {"id": "short", "source": "x", "engine": {"max_model_len": 512}},
        {"id": "rank", "kind": "function", "target": "a:B"},
    ]
}


class Replicas:
    """Statistics of replicas; counts how often they are asked.

    Attributes:
        answers: They answer while this is set.
    """

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}
        self.asked: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def __call__(self, name: str) -> Sequence[JSON]:
        self.asked.append(name)
        await self.answers.wait()
        return [{"max_model_len": self.lengths[name]}] if name in self.lengths else []


def lengths_of(replicas: Replicas) -> ContextLengths:
    return ContextLengths(Routing(parse(MODELS).models), replicas)


async def test_a_replica_is_asked_once() -> None:
    replicas = Replicas()
    lengths = lengths_of(replicas)
    replicas.lengths["llm"] = 2048
    assert [await lengths.of("llm") for _ in range(3)] == [2048] * 3
    assert replicas.asked == ["llm"]


@pytest.mark.parametrize("length", [2048, None])
async def test_requests_that_come_at_once_ask_the_replicas_once(length: int | None) -> None:
    replicas = Replicas()
    lengths = lengths_of(replicas)
    if length is not None:
        replicas.lengths["llm"] = length
    replicas.answers.clear()
    waiting = [asyncio.ensure_future(lengths.of("llm")) for _ in range(3)]
    await until(lambda: bool(replicas.asked))
    # The one that asks leaves; another one asks then, for all.
    waiting.pop(0).cancel()
    await until(lambda: len(replicas.asked) == 2)
    replicas.answers.set()
    assert await asyncio.gather(*waiting) == [length, length]
    assert replicas.asked == ["llm", "llm"]


async def test_a_length_is_not_known_before_a_replica_runs_unless_the_config_states_it() -> None:
    replicas = Replicas()
    lengths = lengths_of(replicas)
    assert (await lengths.of("llm"), await lengths.of("short")) == (None, 512)
    replicas.lengths = {"llm": 2048, "short": 256}
    assert (await lengths.of("llm"), await lengths.of("short")) == (2048, 256)


async def test_a_function_has_no_context() -> None:
    replicas = Replicas()
    assert await lengths_of(replicas).of("rank") is None
    assert replicas.asked == []
