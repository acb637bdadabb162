import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.ingress.context_lengths import RETRY_S, ContextLengths
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

TOO_LARGE = RequestError(400, "invalid_request_error", "never fits", param="max_tokens")


class Replicas:
    """Statistics of replicas; counts how often they are asked.

    Attributes:
        answers: They answer while this is set.
        started: Models that were started.
        starts: Starts end while this is set.
        error: The end of a start; None: a replica runs.
    """

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}
        self.asked: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.started: list[str] = []
        self.starts = asyncio.Event()
        self.error: Exception | None = None

    async def start(self, name: str) -> None:
        self.started.append(name)
        await self.starts.wait()
        if self.error is not None:
            raise self.error
        self.lengths[name] = 2048

    async def __call__(self, name: str) -> Sequence[JSON]:
        self.asked.append(name)
        await self.answers.wait()
        return [{"max_model_len": self.lengths[name]}] if name in self.lengths else []


@dataclass
class Engine:
    """The handle of a model, whose call starts it."""

    replicas: Replicas
    name: str

    def options(self, **_: object) -> "Engine":
        return self

    async def remote(self) -> None:
        await self.replicas.start(self.name)


def lengths_of(replicas: Replicas) -> ContextLengths:
    return ContextLengths(Routing(parse(MODELS).models), replicas, {"llm": Engine(replicas, "llm")})


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


async def test_a_request_that_may_fit_once_the_context_is_known_starts_the_model_and_comes_again() -> None:
    replicas = Replicas()
    lengths = lengths_of(replicas)
    assert await lengths.of("llm") is None
    for _ in range(3):
        found = lengths.refusal("llm", TOO_LARGE)
        assert (found.status, found.retry_after_s) == (503, RETRY_S)
        assert "llm: its context length is not known" in found.message
    await until(lambda: bool(replicas.started))
    replicas.starts.set()
    await until(lambda: bool(replicas.lengths))
    assert await lengths.of("llm") == 2048
    assert lengths.refusal("llm", TOO_LARGE) is TOO_LARGE
    assert replicas.started == ["llm"]


async def test_a_model_whose_start_failed_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    replicas = Replicas()
    replicas.error = ConnectionError("no node")
    replicas.starts.set()
    lengths = lengths_of(replicas)
    for _ in range(2):
        assert lengths.refusal("llm", TOO_LARGE).status == 503
        await until(lambda: bool(caplog.records))
        assert "llm was not started: ConnectionError('no node')" in caplog.text
        caplog.clear()
    assert replicas.started == ["llm", "llm"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("rank", TOO_LARGE),
        ("short", TOO_LARGE),
        ("llm", RequestError(429, "rate_limit_error", "too many")),
    ],
)
async def test_other_refusals_of_a_quota_stay_as_they_are(name: str, error: RequestError) -> None:
    replicas = Replicas()
    assert lengths_of(replicas).refusal(name, error) is error
    assert replicas.started == []
