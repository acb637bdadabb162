"""Virtual engines that keep what came, on one clock of the test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import vllm.envs
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import core as vllm_core

from serve_app.engine.vllm import virtual
from serve_app.engine.vllm.virtual import VirtualClock
from serve_app.settings.models import LLMSettings
from tests.serve_app.simulation.virtual import NUMBERS


class VirtualEngine(virtual.VirtualEngine):
    """A virtual engine with vLLM's own scheduler.

    Attributes:
        tokens: Output tokens of each request.
        seen_at: When each came.
        ended_at: When each request ended.
        cached: Tokens of each prompt that were in the prefix cache.
    """

    live_first = False

    def __init__(self, time: VirtualClock, settings: LLMSettings) -> None:
        super().__init__(time, settings)
        self.tokens: dict[str, list[int]] = {}
        self.seen_at: dict[str, list[float]] = {}
        self.ended_at: dict[str, float] = {}
        self.cached: dict[str, int] = {}

    def add(self, name: str, *arguments: Any, **options: Any) -> None:
        """Add a request."""
        super().add(name, *arguments, **options)
        self.tokens[name], self.seen_at[name] = [], []

    def step(self) -> list[EngineCoreOutput]:
        """Go on by one call of vLLM's loop; return what came."""
        found = super().step()
        for output in found:
            name = output.request_id
            self.tokens[name] += output.new_token_ids
            self.seen_at[name].append(self.time.now)
            if output.finish_reason is not None:
                self.ended_at[name] = self.time.now
            if output.prefill_stats is not None:
                self.cached[name] = output.prefill_stats.num_cached_tokens
        return found

    def run(self) -> None:
        """Run until all requests are done."""
        for _ in range(20_000):
            if not self.busy:
                return
            self.step()
        raise AssertionError("the requests don't end")

    def answer(self, prompt: list[int], max_tokens: int = 20, **fields: Any) -> list[int]:
        """Return the tokens that one request gets."""
        name = f"request-{len(self.tokens)}"
        self.add(name, prompt, max_tokens, **fields)
        self.run()
        return self.tokens[name]


class LiveFirstEngine(VirtualEngine):
    """A virtual engine with the service's scheduler."""

    live_first = True


@contextmanager
def vllm_here() -> Iterator[None]:
    """Let vLLM's engine cores run in this process, and leave the process as it was."""
    # It walks through every object of this process.
    with patch.object(vllm_core, "freeze_gc_heap", lambda: None):
        yield
    vllm.envs.disable_envs_cache()


@contextmanager
def virtual_engines(kind: type[VirtualEngine] = VirtualEngine) -> Iterator[Callable[..., VirtualEngine]]:
    """Return what starts engines on one virtual clock; they end with the block."""
    clock = VirtualClock()
    started: list[VirtualEngine] = []

    def start(engine: dict[str, Any] | None = None, **fields: Any) -> VirtualEngine:
        content = {"id": "demo", "simulate": NUMBERS | fields, "engine": engine or {}}
        started.append(kind(clock, LLMSettings.model_validate(content)))
        return started[-1]

    with vllm_here():
        yield start
        for engine in started:
            engine.stop()
