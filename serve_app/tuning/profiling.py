"""The profile of an engine: the times of steps that it has learned, and the limits of its service."""

import asyncio
import itertools
import random
from collections.abc import Callable
from datetime import datetime

from serve_app.client import ServiceError
from serve_app.simulation.profiles import REQUEST_MS, SERIAL_MS, Profile
from serve_app.stats import SchedulerFigures
from serve_app.system.yaml_text import dump
from serve_app.tuning.service import TOKENS, LoadAnswer, LoadRequest, ModelFacts, Service

WAVES = ((1, 32), (32, 32), (8, 1024), (128, 32), (1, 512), (8, 4096), (32, 256), (1, 4096), (8, 32))
"""Requests that run at once, and tokens of each prompt: such steps tell the four times apart."""

ANSWER = 32
"""Tokens of an answer."""

REQUESTS, TEACHES_S, WAVE_S = 400, 40.0, 120.0
"""Requests and seconds after which no further wave begins; most seconds of a wave."""

LEAST_STEPS = 150
"""Fewest steps from which a profile is made."""

LOOK_S, LOOKS = 0.2, 25
"""Seconds between two looks at the statistics, which are some seconds old, and most looks."""

LARGEST_ERROR = 0.1
"""Mean error above which a profile is called bad."""

DIGITS = 4
"""Significant digits of a learned time."""


async def learn(
    service: Service,
    facts: ModelFacts,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[ModelFacts, SchedulerFigures]:
    """Return the facts about a model, and the figures of the engine that has learned from the most steps.

    An idle engine gets requests first. Their prompts are random, so that no prompt is in the prefix cache.

    Args:
        service: The service.
        facts: Facts about the model.
        progress: Called with a line about each wave of requests.

    Raises:
        ServiceError: A request fails, or the engine has not learned enough.
    """
    if not facts.in_flight:
        facts = await _taught(service, facts, progress)
    found = facts.scheduler
    if found is None:
        raise ServiceError(
            f"{service.url}: the engine of {facts.model} learns no times of steps; "
            "remove engine.scheduling_policy: fcfs"
        )
    if found.steps < LEAST_STEPS or not found.step_s.base:
        raise ServiceError(
            f"{service.url}: the engine of {facts.model} has learned from {found.steps} steps, which is too "
            "few or all alike; ask again after more traffic, or without traffic"
        )
    return facts, found


async def _taught(
    service: Service,
    facts: ModelFacts,
    progress: Callable[[str], None],
) -> ModelFacts:
    """Send requests to an idle engine; return the facts after them."""
    sent, ends_at = 0, service.clock() + TEACHES_S
    for count, prompt in itertools.cycle(WAVES):
        if sent >= REQUESTS or service.clock() > ends_at:
            break
        count = min(count, facts.max_num_seqs)
        room = min(facts.max_model_len, facts.kv_tokens // count) - ANSWER - 1
        progress(f"{sent} requests sent, now {count} at once")
        asks = [
            _request(facts.model, random.choices(TOKENS, k=max(1, min(prompt, room)))) for _ in range(count)
        ]
        answers = [LoadAnswer(service.clock(), ANSWER) for _ in asks]
        try:
            async with asyncio.timeout(WAVE_S):
                await asyncio.gather(*map(service.send, asks, answers))
        except TimeoutError:
            raise ServiceError(
                f"{service.url}: {count} requests to {facts.model} have no answer after {WAVE_S:g} s; "
                "look at `saturate top` and at the service's log"
            ) from None
        sent += count
    for _ in range(LOOKS):
        seen = await service.facts(facts.model)
        if seen.submitted >= facts.submitted + sent and not seen.in_flight:
            break
        await asyncio.sleep(LOOK_S)
    return seen


def _request(model: str, prompt: list[int]) -> LoadRequest:
    body = {"model": model, "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return LoadRequest("/v1/completions", body, ANSWER)


def profile_of(facts: ModelFacts, learned: SchedulerFigures, name: str, source: str) -> Profile:
    """Return the profile of an engine; `request_ms` and `serial_ms` are defaults.

    Args:
        facts: Facts about the model.
        learned: The figures of its scheduler.
        name: Name of the profile.
        source: Where and when the figures were read.
    """
    step = learned.step_s
    times = {
        "base_ms": step.base,
        "per_prefill_token_ms": step.prompt_token,
        "per_sequence_ms": step.sequence,
        "per_kv_token_ms": step.context_token,
    }
    limits = {"max_num_batched_tokens": facts.max_num_batched_tokens} if facts.max_num_batched_tokens else {}
    return Profile.model_validate(
        {
            "name": name[:64],
            "source": source,
            **{key: float(f"{seconds * 1e3:.{DIGITS}g}") for key, seconds in times.items()},
            "load_s": facts.load_s,
            "sleep_s": facts.sleep_s,
            "wake_s": facts.wake_s,
            "kv_tokens": facts.kv_tokens,
            "max_model_len": min(facts.max_model_len, facts.kv_tokens),
            "max_num_seqs": facts.max_num_seqs,
            "request_ms": REQUEST_MS,
            "serial_ms": SERIAL_MS,
            **limits,
        }
    )


def file_of(profile: Profile, learned: SchedulerFigures) -> str:
    """Return the text of a profile's file, for `saturate plan --device` and for `simulate` in a config."""
    fields = profile.model_dump(exclude={"device_gb", "awake_gb", "pin_s", "async_scheduling"})
    turns = "" if profile.sleep_s else " sleep_s and wake_s are 0: the model has not slept."
    return (
        f"# Learned from {learned.steps:,} steps, mean error {learned.step_error:.1%}. request_ms and "
        f"serial_ms are defaults.{turns}\n{dump(fields)}"
    )


def source_of(url: str, at: datetime) -> str:
    """Return where and when a profile was read."""
    return f"learned by the engine at {url}, {at:%Y-%m-%d %H:%M} UTC"[:300]
