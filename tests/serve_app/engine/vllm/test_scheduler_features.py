"""Live traffic goes first with each feature of vLLM, and rows lose little for it; nothing stands still.

`pytest -s` prints the table: 99th percentile of live first tokens and rows' tokens per second, beside arrival
order.
"""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.progress import wait_until
from tests.serve_app.engine.vllm.features import (
    DRAFTS,
    GOALS,
    STORE,
    Drafts,
    Images,
    Loading,
    Stages,
    States,
    Windows,
    engine_of,
    image,
)
from tests.serve_app.simulation.virtual_engine import LiveFirstEngine, VirtualEngine, virtual_engines

DEVICE = {
    "base_ms": 20.0,
    "per_prefill_token_ms": 0.1,
    "per_sequence_ms": 0.05,
    "per_kv_token_ms": 0.0002,
    "load_s": 0.0,
    "kv_tokens": 60_000,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
}

LIVE, SECONDS = 16, 20.0
"""Live requests, and seconds of a run."""


class Feature(NamedTuple):
    """A feature: options of vLLM, the device, what its requests look like, and the rows in flight."""

    engine: Mapping[str, Any] = MappingProxyType({})
    device: Mapping[str, Any] = MappingProxyType({})
    kind: Callable[[type[VirtualEngine]], type[VirtualEngine]] = lambda kind: kind
    live_prompt: int = 300
    shared: int = 0
    grammar: str = ""
    image: int = 0
    rows: int = 40


FEATURES = {
    "none": Feature(),
    "steps in turn": Feature(device={"async_scheduling": False}),
    "parts of long prompts": Feature({"long_prefill_token_threshold": 256}, live_prompt=700),
    "a nearly full prefix cache": Feature(device={"kv_tokens": 20_000}, live_prompt=2000, shared=1900),
    "a watermark": Feature({"watermark": 0.05}, {"kv_tokens": 20_000}),
    "windows": Feature(kind=lambda kind: engine_of(Windows, kind), live_prompt=700),
    "states": Feature(
        device={"kv_tokens": 120_000}, kind=lambda kind: engine_of(States, kind), live_prompt=700
    ),
    "a store of KV caches": Feature(
        {"kv_transfer_config": STORE},
        {"max_num_seqs": 32},
        lambda kind: engine_of(Loading, kind),
        live_prompt=700,
    ),
    "drafts": Feature(
        {"speculative_config": DRAFTS},
        {"async_scheduling": False},
        lambda kind: engine_of(Drafts, kind),
    ),
    "grammars": Feature(grammar="[a-z]*"),
    "stages": Feature(kind=lambda kind: engine_of(Stages, kind)),
    "stages in turn": Feature(device={"async_scheduling": False}, kind=lambda kind: engine_of(Stages, kind)),
    "images": Feature(kind=lambda kind: engine_of(Images, kind), image=500),
    "large images": Feature(kind=lambda kind: engine_of(Images, kind), image=1500, rows=10),
    # An image with its tokens fits the goal. A larger one waits until it may exceed it: vLLM 0.33 cuts none.
    "whole images": Feature(
        {"disable_chunked_mm_input": True},
        kind=lambda kind: engine_of(Images, kind),
        image=200,
    ),
}


class Seen(NamedTuple):
    """What a run has shown."""

    first_p99_s: float
    gap_p99_s: float
    row_tokens_s: float


def run(feature: Feature, kind: type[VirtualEngine], policy: str) -> Seen:
    """Run rows without end, and a live request each second; return what is seen of both."""
    with virtual_engines(feature.kind(kind)) as start:
        engine = start(engine={"scheduling_policy": policy, **feature.engine}, **{**DEVICE, **feature.device})
        engine.host_s, engine.submit_s = 0.001, 0.0005
        draw = random.Random(1)
        prefix = [draw.randrange(3, 60) for _ in range(feature.shared)]
        rows: dict[str, int] = {}

        def images(name: str) -> list[Any]:
            tokens = feature.image if name.startswith("row") else feature.image // 4
            return [image(name, 50, tokens)] if tokens else []

        def add_row() -> None:
            name = f"row {len(engine.tokens)}"
            rows[name] = draw.randint(20, 100)
            text = [draw.randrange(3, 60) for _ in range(max(600, feature.image + 100))]
            engine.add(name, text, rows[name], priority=1, images=images(name))

        def add_live(number: int) -> None:
            text = prefix + [draw.randrange(3, 60) for _ in range(feature.live_prompt - feature.shared)]
            told: dict[str, Any] = {"extra_args": {GOALS: (0.6, 0.08)}}
            if feature.grammar:
                params = told["structured_outputs"] = StructuredOutputsParams(regex=feature.grammar)
                # vLLM's front end chooses it.
                params._backend = "xgrammar"
            engine.add(f"live {number}", text, 30, images=images(f"live {number}"), **told)
            if feature.grammar:
                # A thread compiles it, in real time.
                asked = engine.scheduler.requests[f"live {number}"].structured_output_request
                wait_until(lambda: asked.grammar is not None)

        for _ in range(feature.rows):
            add_row()
        tokens, number, sent = 0, 0, {}
        began = engine.time.now
        while engine.time.now < began + SECONDS:
            if number < LIVE and engine.time.now >= began + 5.0 + 0.7 * number:
                add_live(number)
                sent[f"live {number}"] = engine.time.now
                number += 1
            assert engine.busy
            for output in engine.step():
                if output.request_id in rows and output.finish_reason is not None:
                    tokens += rows.pop(output.request_id)
                    add_row()
        seconds = engine.time.now - began
        assert all(name in engine.ended_at for name in sent)
        # No row that was there at the beginning is left.
        assert min(int(name.split()[1]) for name in rows) >= feature.rows
        first = sorted(engine.seen_at[name][0] - at for name, at in sent.items())
        gaps = sorted(
            later - earlier
            for name in sent
            for earlier, later in zip(engine.seen_at[name], engine.seen_at[name][1:], strict=False)
        )
        return Seen(first[-1], gaps[int(0.99 * len(gaps))], tokens / seconds)


@pytest.mark.parametrize("name", FEATURES)
def test_live_requests_go_first_with_each_feature(name: str) -> None:
    feature = FEATURES[name]
    ours, arrival = run(feature, LiveFirstEngine, "priority"), run(feature, VirtualEngine, "fcfs")
    print(
        f"\n{name:28} first p99 {ours.first_p99_s:5.2f} / {arrival.first_p99_s:5.2f} s, "
        f"gap p99 {ours.gap_p99_s * 1e3:4.0f} / {arrival.gap_p99_s * 1e3:4.0f} ms, "
        f"rows {ours.row_tokens_s:4.0f} / {arrival.row_tokens_s:4.0f} tokens/s"
    )
    assert ours.first_p99_s < 0.6
    # An image is encoded whole.
    assert ours.gap_p99_s < 0.1 + feature.image * DEVICE["per_prefill_token_ms"] / 1000
    assert ours.row_tokens_s > 0.6 * arrival.row_tokens_s
