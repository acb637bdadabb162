"""The work of each call, against vLLM's own counters."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from batcher import ContinuousBatcher
from serve_app.engine.admission import AdmissionRequest, AdmissionResult, set_current
from serve_app.engine.vllm.usage import EngineCounters
from serve_app.ledger.calls import Call, CallBook, Origin
from serve_app.ledger.rows import Row
from tests.progress import STILL_S
from tests.serve_app.engine.vllm_doubles import SteppedEngine, stepped

TEN = tokens_input(list(range(10)))
FINAL, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


@pytest.fixture
async def batcher() -> AsyncIterator[ContinuousBatcher]:
    async with ContinuousBatcher(capacity=10_000) as batcher:
        yield batcher


@pytest.fixture
def book() -> CallBook:
    book = CallBook("demo", "r", "r")
    book.keep_ended()
    return book


def rows(book: CallBook) -> list[Row]:
    return [call.row(0.0) for call in book.take()[1]]


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def counted(book: CallBook, engine: SteppedEngine) -> bool:
    """Return whether the book has what vLLM has counted."""
    _, prompt, cached, output, _ = book.total()
    counters = engine.counters
    return (prompt, cached, output) == (counters.prompt, engine.cached, counters.output)


def begin(llm: Any, call: Call, *, results: int | None = None, **params: Any) -> "asyncio.Task[None]":
    """Run a request as a task.

    Args:
        llm: The client.
        call: Its call, which ends with the task.
        results: Results after which the reader leaves; None: it stays to the end.
        params: Sampling parameters.
    """

    async def ask() -> None:
        set_current(AdmissionRequest(), AdmissionResult(call=call))
        sampling = SamplingParams(**({"max_tokens": 50, "output_kind": DELTA, "detokenize": False} | params))
        try:
            outputs = llm.generate(TEN, sampling, "r")
            async with contextlib.aclosing(outputs):
                seen = 0
                async for _ in outputs:
                    seen += 1
                    if seen == results:
                        return
        finally:
            call.close()

    return asyncio.ensure_future(ask())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(1, 3), st.sampled_from([DELTA, FINAL])),
        st.tuples(st.just("step"), st.lists(st.booleans(), max_size=8), st.integers(1, 3)),
        st.tuples(st.just("end"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_the_book_has_what_vllm_counts_at_any_time(steps: list[tuple[str, Any, Any]]) -> None:
    async def run(patch: pytest.MonkeyPatch) -> None:
        book = CallBook("demo", "r", "r")
        book.keep_ended()
        async with ContinuousBatcher(capacity=10_000) as batcher:
            llm, engine = stepped(patch, batcher, book)
            tasks: list[asyncio.Task[None]] = []
            seen: list[str] = []
            for action, what, how in steps:
                seen = list(dict.fromkeys([*seen, *engine.running]))
                match action:
                    case "begin":
                        call = book.open(Origin(tenant="acme"))
                        tasks.append(begin(llm, call, n=what, output_kind=how))
                        await turns()
                    case "step":
                        # Also outputs of sequences that were aborted meanwhile, which vLLM drops.
                        chosen = [name for name, wanted in zip(seen, what, strict=False) if wanted]
                        engine.step(*chosen, tokens=how, cached=4)
                    case "end":
                        engine.step(*engine.running[what : what + 2], finish=True)
                    case "leave" if tasks:
                        tasks.pop(what % len(tasks)).cancel()
                    case "wait":
                        await turns()
                assert counted(book, engine)
            for task in tasks:
                task.cancel()
            await turns()
            assert not engine.running
            assert counted(book, engine)
            assert sum(row.output_tokens for row in rows(book)) == engine.counters.output

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(run(patch))


async def test_tokens_that_no_client_has_got_are_counted(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, book: CallBook
) -> None:
    llm, engine = stepped(monkeypatch, batcher, book)
    task = begin(llm, book.open(Origin(key="ada")))
    await turns()
    engine.step(cached=8)
    await turns()
    engine.step(tokens=5)
    # Its reader leaves before it gets the five.
    task.cancel()
    await turns()
    # The engine sends one more, which vLLM drops.
    (row,) = rows(book)
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (10, 8, 6)
    assert (row.key, row.outcome) == ("ada", "cancelled")


async def test_a_prompt_that_is_aborted_before_its_first_token_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, book: CallBook
) -> None:
    llm, engine = stepped(monkeypatch, batcher, book)
    task = begin(llm, book.open(Origin()))
    await turns()
    task.cancel()
    await turns()
    (row,) = rows(book)
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (0, 0, 0)
    assert counted(book, engine)


@pytest.mark.parametrize(("ends", "outcome"), [(True, "ok"), (False, "cancelled")])
async def test_a_reader_that_leaves_with_the_last_result_has_it_all(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, book: CallBook, ends: bool, outcome: str
) -> None:
    llm, engine = stepped(monkeypatch, batcher, book)
    begin(llm, book.open(Origin()), results=1)
    await turns()
    engine.step(finish=ends)
    await turns()
    assert [row.outcome for row in rows(book)] == [outcome]


@pytest.mark.parametrize(("error", "outcome"), [(EngineDeadError(), "lost"), (ValueError("bad"), "failed")])
async def test_a_failure_of_the_engine_is_the_outcome(
    monkeypatch: pytest.MonkeyPatch,
    batcher: ContinuousBatcher,
    book: CallBook,
    error: Exception,
    outcome: str,
) -> None:
    llm, engine = stepped(monkeypatch, batcher, book)
    task = begin(llm, book.open(Origin()))
    await turns()
    engine.step()
    engine.processor.propagate_error(error)
    with pytest.raises(type(error)):
        await task
    assert [(row.outcome, row.output_tokens) for row in rows(book)] == [(outcome, 1)]


async def test_each_answer_of_a_prompt_has_its_prompt(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, book: CallBook
) -> None:
    llm, engine = stepped(monkeypatch, batcher, book)
    task = begin(llm, book.open(Origin()), n=3, output_kind=FINAL)
    await turns()
    engine.step(tokens=2)
    engine.step(finish=True)
    await task
    assert [(row.prompt_tokens, row.output_tokens) for row in rows(book)] == [(30, 9)]
    assert counted(book, engine)


async def test_a_beam_search_has_all_that_it_asks_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, book: CallBook
) -> None:
    llm, engine = stepped(monkeypatch, batcher, book)
    asked = 0

    async def search(*, prompt: Any, params: Any, request_id: str) -> Any:
        nonlocal asked
        for _ in range(3):
            tasks = [asyncio.ensure_future(one(prompt)) for _ in range(params.beam_width)]
            await turns()
            engine.step(finish=True)
            for task in tasks:
                async with asyncio.timeout(STILL_S):
                    last = await task
            asked += len(tasks)
        yield last

    async def one(prompt: Any) -> Any:
        params = SamplingParams(max_tokens=1, output_kind=FINAL, detokenize=False)
        return [each async for each in llm.generate(prompt, params, "r")][-1]

    call = book.open(Origin())
    set_current(AdmissionRequest(), AdmissionResult(call=call))
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    async for _ in llm.beam_search(search, prompt=TEN, params=params, request_id="r"):
        pass
    call.close()
    assert [(row.prompt_tokens, row.output_tokens) for row in rows(book)] == [(10 * asked, asked)]
    assert counted(book, engine)


async def test_an_embedding_has_its_prompt(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, book: CallBook
) -> None:
    llm, engine = stepped(monkeypatch, batcher, book)
    call = book.open(Origin())

    async def embed() -> None:
        result = AdmissionResult(call=call)
        set_current(AdmissionRequest(), result)
        async for _ in llm.encode(TEN, PoolingParams(task="embed"), "r"):
            pass
        call.close()
        assert result.usage.cached_tokens == 2

    task = asyncio.ensure_future(embed())
    await turns()
    engine.step(cached=2, finish=True, output=torch.zeros(3))
    await task
    found = [(row.prompt_tokens, row.cached_tokens, row.output_tokens, row.outcome) for row in rows(book)]
    assert found == [(10, 2, 0, "ok")]


async def test_the_usage_of_an_answer_has_the_tokens_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, book: CallBook
) -> None:
    llm, engine = stepped(monkeypatch, batcher, book)
    result = AdmissionResult()

    async def ask() -> None:
        set_current(AdmissionRequest(), result)
        params = SamplingParams(max_tokens=5, output_kind=FINAL, detokenize=False)
        async for _ in llm.generate(TEN, params, "r"):
            pass

    task = asyncio.ensure_future(ask())
    await turns()
    engine.step(cached=6, finish=True)
    await task
    assert (result.usage.prompt_tokens, result.usage.cached_tokens) == (10, 6)
    # It has no call: the book has it all the same.
    assert counted(book, engine)


async def test_a_sequence_outside_of_any_call_is_counted(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, book: CallBook
) -> None:
    _, engine = stepped(monkeypatch, batcher, book)
    params = SamplingParams(output_kind=FINAL, detokenize=False)
    task = asyncio.ensure_future(anext(engine.run(TEN, params, "warm-up")))
    await turns()
    engine.step(finish=True)
    await task
    assert book.total()[1:4] == (10, 0, 1)


def test_a_step_without_statistics_counts_nothing() -> None:
    counters = EngineCounters()
    counters.record(None, None)
    assert (counters.prompt, counters.output) == (0, 0)


async def test_a_client_does_not_state_how_much_of_its_prompt_was_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, book: CallBook
) -> None:
    llm, engine = stepped(monkeypatch, batcher, book)
    # vLLM believes it for a prompt that another engine has computed.
    claim = {"do_remote_prefill": True, "remote_prefill_cached_tokens": 1_000_000}
    task = begin(llm, book.open(Origin()), extra_args={"kv_transfer_params": claim})
    await turns()
    engine.step(cached=4, finish=True)
    await task
    assert [(row.prompt_tokens, row.cached_tokens) for row in rows(book)] == [(10, 4)]
