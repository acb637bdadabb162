"""Sends requests to a real engine, and prints for each what was admitted and what vLLM ran, as JSON.

A program of its own, since it takes an engine: `python -m tests.e2e.admitted_work`.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import redirect_stdout
from typing import Any

from serve_app.api.facts import Facts
from serve_app.api.routes import TOKENIZING
from serve_app.engine.deployment import Engine
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_MODEL
from serve_app.wire.frame import unpack
from serve_app.wire.request import RelayRequest
from tests.progress import STILL_S
from tests.serve_app.answers import KEEP_ALIVE

CONTEXT = 1024
KV_BYTES = 256 << 20
LIMIT_S = STILL_S
"""Seconds for one request."""

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

ASK = "What is 12+34?"
CHAT = [{"role": "user", "content": ASK}]
OPTIONS = {"model": "demo", "max_tokens": 8, "ignore_eos": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": ("/v1/completions", {"prompt": ASK}),
    "prompt: list": ("/v1/completions", {"prompt": [ASK] * 4}),
    "prompt: tokens": ("/v1/completions", {"prompt": [[70, 71, 72]] * 4}),
    "prompt: list, n": ("/v1/completions", {"prompt": [ASK] * 2, "n": 3, "temperature": 1.0}),
    "n": ("/v1/completions", {"prompt": ASK, "n": 3, "temperature": 1.0}),
    "n, stream": ("/v1/completions", {"prompt": ASK, "n": 3, "temperature": 1.0, "stream": True}),
    "best_of": ("/v1/completions", {"prompt": ASK, "best_of": 3}),
    "beams": ("/v1/completions", {"prompt": ASK, "n": 3, "use_beam_search": True}),
    "beams: list": ("/v1/completions", {"prompt": [ASK] * 2, "n": 3, "use_beam_search": True}),
    "echo": ("/v1/completions", {"prompt": ASK, "echo": True, "logprobs": 5}),
    "echo alone": ("/v1/completions", {"prompt": ASK, "echo": True, "max_tokens": 0}),
    "prompt_logprobs": ("/v1/completions", {"prompt": ASK, "prompt_logprobs": 5}),
    "max_tokens": ("/v1/completions", {"prompt": ASK, "max_tokens": 150}),
    "truncate": ("/v1/completions", {"prompt": ASK * 200, "truncate_prompt_tokens": 20}),
    "chat": ("/v1/chat/completions", {"messages": CHAT}),
    "chat: no max_tokens": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": None, "stop": ["6"]}),
    "chat: n": ("/v1/chat/completions", {"messages": CHAT, "n": 3, "temperature": 1.0}),
    "chat: beams": ("/v1/chat/completions", {"messages": CHAT, "n": 3, "use_beam_search": True}),
    "chat: logprobs": (
        "/v1/chat/completions",
        {"messages": CHAT, "logprobs": True, "top_logprobs": 5, "prompt_logprobs": 5},
    ),
    "chats": ("/v1/chat/completions/batch", {"messages": [CHAT] * 3}),
    "chats: n": ("/v1/chat/completions/batch", {"messages": [CHAT] * 2, "n": 2, "temperature": 1.0}),
    "responses": ("/v1/responses", {"input": ASK, "max_output_tokens": 8}),
    "messages": ("/v1/messages", {"messages": CHAT}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": CHAT}),
    "tokenize": ("/tokenize", {"prompt": ASK}),
    "tokenize: chat": ("/tokenize", {"messages": CHAT}),
    "tokenize: long": ("/tokenize", {"prompt": "x" * (CONTEXT + 1)}),
    "tokenize: huge": ("/tokenize", {"prompt": "x" * (4 << 20)}),
    "chat: huge": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * (4 << 20)}]}),
    "detokenize": ("/detokenize", {"tokens": [70] * 20}),
    "detokenize: long": ("/detokenize", {"tokens": [70] * (CONTEXT + 200)}),
    "generate": ("/generate", {"prompts": [ASK] * 3}),
    "generate: chats": ("/generate", {"messages": [CHAT] * 3}),
}
"""Requests by name: route and body."""


class Watch:
    """Counts what one request makes an engine do, and what was admitted for it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine._engine
        self._block = self._engine.llm.vllm_config.cache_config.block_size
        self.counts: dict[str, int] = {}
        core, renderer = self._engine.llm.engine_core, self._engine.llm.renderer
        add = core.add_request_async

        async def added(request: Any) -> None:
            self._look()
            self.counts["sequences"] += 1
            await add(request)

        core.add_request_async = added
        self._count(type(renderer.get_tokenizer()), "__call__", self._tokenized)

    def reset(self) -> None:
        """Begin with another request."""
        self.counts = dict.fromkeys(
            ("sequences", "tokenized", "outside", "peak_tokens", "peak_cost", "beyond", "uncounted"), 0
        )

    def _look(self) -> None:
        """Compare what vLLM holds, with the one that is added, with what the batcher has let in."""
        states = self._engine.llm.output_processor.request_states.values()
        tokens = 0
        for state in states:
            length = state.prompt_len + (state.max_tokens_param or 0)
            tokens += -(-min(length, CONTEXT) // self._block) * self._block
        stats = self._engine.batcher.stats
        counts = self.counts
        if tokens >= counts["peak_tokens"]:
            counts["peak_tokens"], counts["peak_cost"] = tokens, stats.running_cost
        counts["beyond"] += tokens > stats.running_cost
        counts["uncounted"] += len(states) > stats.running

    def _tokenized(self) -> None:
        """Count a text that is tokenized, and whether that is outside of a slot."""
        self.counts["tokenized"] += 1
        running = sum(each.stats.running for each in (self._engine.batcher, self._engine._texts))
        self.counts["outside"] += not running

    def _count(self, owner: Any, method: str, count: Callable[[], None]) -> None:
        original = getattr(owner, method)

        def counted(*args: Any, **options: Any) -> Any:
            count()
            return original(*args, **options)

        setattr(owner, method, counted)


def facts_of(path: str, body: dict[str, Any], size: int) -> Facts:
    """Return the facts of a case, as the Ingress finds them."""
    runs = path not in TOKENIZING and "count_tokens" not in path
    answers = max(body.get("n") or 1, body.get("best_of") or 1)
    stated = next((body[name] for name in ("max_tokens", "max_output_tokens") if body.get(name)), None)
    output = (1 if body.get("max_tokens") == 0 else stated) if runs else 0
    return Facts(size=size, prompt=size if runs else 0, answers=answers, output=output, runs=runs)


async def started() -> Engine:
    """Return a real engine behind its deployment's class, without Ray."""
    settings = LLMSettings(
        id="demo",
        source=DEMO_MODEL,
        engine={  # type: ignore[arg-type]
            "max_model_len": CONTEXT,
            "max_num_seqs": 64,
            "kv_cache_memory_bytes": KV_BYTES,
            "enforce_eager": True,
            # In one process: two would poll each other.
            "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        },
    )
    engine = Engine.__new__(Engine)
    # Serve awaits the constructor too.
    await engine.__init__(settings, 10_000)  # type: ignore[misc]
    return engine


async def answer(engine: Engine, request: RelayRequest) -> tuple[int, bytes]:
    """Return the status and the text of an answer."""
    status, text = 0, b""
    async with asyncio.timeout(LIMIT_S):
        async for message in engine.relay(request):
            if message != KEEP_ALIVE:
                piece = unpack(message)
                status = piece.head.status if piece.head else status
                text += piece.body
    return status, text


async def run() -> dict[str, Any]:
    """Return the results of all cases."""
    engine = await started()
    results: dict[str, Any] = {}
    try:
        watch = Watch(engine)
        for name, (path, body) in CASES.items():
            watch.reset()
            content = json.dumps(OPTIONS | body).encode()
            headers = [(b"content-type", b"application/json")]
            facts = facts_of(path, OPTIONS | body, len(content))
            request = RelayRequest("POST", path, b"", headers, content, facts=facts)
            status, text = await answer(engine, request)
            left = engine._engine.batcher.stats.running
            results[name] = watch.counts | {"status": status, "left": left, "text": text.decode()[:300]}
    finally:
        await engine.__del__()
    return results


def report(run: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Print the results of a run as JSON, and end this process."""
    os.environ |= ENVIRONMENT
    # vLLM's processes write to the same stream: the results are its last line.
    with redirect_stdout(sys.stderr):
        results = asyncio.run(run())
    print(f"\n{json.dumps(results)}", flush=True)
    # Nothing is left to be ended in good order.
    os._exit(0)


if __name__ == "__main__":
    report(run)
