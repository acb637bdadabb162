"""Ways in which a load reaches a server."""

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.benchmarks.serve.client import Answer, Request, run
from tests.benchmarks.serve.groups import CLIENT
from tests.benchmarks.serve.loads import CHUNK, Load, Prompt
from tests.benchmarks.serve.pipes import Pipe
from tests.benchmarks.serve.running import Server, environment
from tests.benchmarks.serve.servers import OFFLINE, OURS, RAY, RAY_DIRECT, SEEDS, VARIANTS, VLLM

HANDLE = f"{OURS}, handle"
"""Ours over the handle, as a candidate in the tables."""

FIXED = {"temperature": 0, "ignore_eos": True}

IDLE_S = 0.3
"""Seconds between two bursts."""


@dataclass(frozen=True, slots=True)
class Run:
    """Answers to a load, and the CPU time they took.

    Attributes:
        answers: Answers, in the order in which they ended.
        client_cpu_s: CPU seconds of the client.
        cpu_s: CPU seconds of the server, by group of processes.
        idle_s: Seconds between the first request and the last answer in which nothing was asked.
    """

    answers: Sequence[Answer]
    client_cpu_s: float
    cpu_s: Mapping[str, float]
    idle_s: float = 0.0

    @property
    def took_s(self) -> float:
        """Seconds from the first request to the last answer, without those in which nothing was asked."""
        return _span_s(self.answers) - self.idle_s


Way = Callable[[Server, Sequence[Prompt]], Run]


def chat(prompt: Prompt) -> Request:
    """Return a streaming chat request."""
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": prompt.tokens,
        "stream": True,
        # The last event has the number of tokens.
        "stream_options": {"include_usage": True},
    }
    return Request("/v1/chat/completions", body | FIXED, prompt.tokens)


def completion(prompt: Prompt) -> Request:
    """Return a request for one completion."""
    body = {"model": "demo", "prompt": prompt.text, "max_tokens": prompt.tokens}
    return Request("/v1/completions", body | FIXED, prompt.tokens)


def completions(prompts: Sequence[Prompt]) -> Request:
    """Return a request for the completions of a list of prompts, all of one length."""
    body = {"model": "demo", "prompt": [p.text for p in prompts], "max_tokens": prompts[0].tokens}
    return Request("/v1/completions", body | FIXED, sum(p.tokens for p in prompts), len(prompts))


def generate(prompts: Sequence[Prompt]) -> Request:
    """Return a request of `/generate` for a list of prompts, all of one length."""
    body = {"prompts": [p.text for p in prompts], "max_tokens": prompts[0].tokens}
    return Request("/generate", body | FIXED, sum(p.tokens for p in prompts), len(prompts))


def for_model(request: Request, model: str) -> Request:
    """Return a request for another model, or an adapter."""
    return replace(request, body={**request.body, "model": model})


def single(request: Callable[[Prompt], Request], connections: int) -> Way:
    """Return the way of one prompt per request."""
    return lambda server, prompts: _http(server, connections, [request(prompt) for prompt in prompts])


def lists(request: Callable[[Sequence[Prompt]], Request], size: int, in_flight: int) -> Way:
    """Return the way of `size` prompts per request and `in_flight` requests at once."""
    return lambda server, prompts: _http(server, in_flight, [request(part) for part in _parts(prompts, size)])


def bursts(request: Callable[[Prompt], Request], size: int) -> Way:
    """Return the way of `size` requests at once on an idle server, one burst after the other."""

    def way(server: Server, prompts: Sequence[Prompt]) -> Run:
        before, client = server.usage(), time.process_time()
        found: list[list[Answer]] = []
        for part in _parts(prompts, size):
            time.sleep(IDLE_S)
            found.append(asyncio.run(run(server.port, size, [request(prompt) for prompt in part])))
        answers = [answer for part in found for answer in part]
        busy = sum(map(_span_s, found))
        client = time.process_time() - client
        return Run(answers, client, server.usage().since(before), _span_s(answers) - busy)

    return way


def over_handle(server: Server, prompts: Sequence[Prompt]) -> Run:
    """Send lists of 50 prompts, ten at once, over a deployment handle, from a process of its own."""
    bodies = [generate(part) for part in _parts(prompts, CHUNK)]
    command = [sys.executable, "-m", "tests.benchmarks.serve.handle"]
    # As in the configs for replicas, and in k8s/ for their callers.
    env = environment() | {"RAY_ADDRESS": "auto", "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1"}
    with Pipe(command, env, server.log.with_name("handle.log")) as pipe:
        pipe.read()
        pipe.ask({"lists": [body.body for body in bodies[:2]], "in_flight": 2})
        before = server.usage()
        reply = pipe.ask({"lists": [body.body for body in bodies], "in_flight": 10})
        used = server.usage().since(before)
    answers = []
    for one, body in zip(reply["answers"], bodies, strict=True):
        if one["tokens"] != body.tokens:
            raise RuntimeError(f"the answer has {one['tokens']} tokens, not {body.tokens}")
        answers.append(Answer(body.tokens, body.prompts, one["started"], one["ended"]))
    used.pop(CLIENT, None)
    return Run(answers, reply["cpu_s"], used)


def at_once(server: Server, prompts: Sequence[Prompt]) -> Run:
    """Give all prompts to `LLM.generate` in one call."""
    assert server.pipe
    before, client = server.usage(), time.process_time()
    reply = server.pipe.ask({"prompts": [p.text for p in prompts], "tokens": [p.tokens for p in prompts]})
    used = server.usage().since(before)
    if reply["tokens"] != [prompt.tokens for prompt in prompts]:
        raise RuntimeError("LLM.generate returned another number of tokens than requested")
    answer = Answer(sum(reply["tokens"]), len(prompts), reply["started"], reply["ended"])
    return Run([answer], time.process_time() - client, used)


def ways(load: Load) -> Mapping[str, Mapping[str, Way]]:
    """Return the ways of a load: by server, then by candidate, which is the name in the tables."""
    n = load.in_flight
    if load.kind == "lists":
        return {
            OURS: {OURS: lists(generate, CHUNK, n // CHUNK), HANDLE: over_handle},
            **{name: {name: lists(generate, CHUNK, n // CHUNK)} for name in VARIANTS},
            # Its best number of connections isn't known in advance, so several are tried.
            VLLM: {
                **{f"{VLLM}, {each} connections": single(completion, each) for each in (64, 128, n)},
                f"{VLLM}, lists": lists(completions, CHUNK, n // CHUNK),
            },
            SEEDS: {SEEDS: lists(generate, CHUNK, n // CHUNK)},
            OFFLINE: {OFFLINE: at_once},
        }
    if load.kind == "mixed":
        one = single(lambda prompt: generate([prompt]), n)
        return {
            OURS: {OURS: one},
            VLLM: {VLLM: single(completion, n)},
            SEEDS: {SEEDS: one},
            OFFLINE: {OFFLINE: at_once},
        }
    if load.kind == "burst":
        return {name: {name: bursts(chat, n)} for name in (OURS, VLLM, RAY_DIRECT, RAY, *VARIANTS)}
    request = chat if load.kind == "chat" else completion
    return {name: {name: single(request, n)} for name in (OURS, VLLM, RAY_DIRECT, RAY, *VARIANTS)}


def _http(server: Server, connections: int, requests: Sequence[Request]) -> Run:
    before, client = server.usage(), time.process_time()
    answers = asyncio.run(run(server.port, connections, requests))
    client = time.process_time() - client
    return Run(answers, client, server.usage().since(before))


def _span_s(answers: Sequence[Answer]) -> float:
    return max(answer.ended_at for answer in answers) - min(answer.sent_at for answer in answers)


def _parts(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    numbers = iter(prompts)
    while part := list(itertools.islice(numbers, size)):
        yield part
