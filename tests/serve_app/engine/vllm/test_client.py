"""Admission in front of vLLM's engine client."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from batcher import ContinuousBatcher
from serve_app.api.scheduling import Scheduling
from serve_app.engine.admission import AdmissionRequest, AdmissionResult, set_current
from serve_app.engine.grammar_check import GrammarCheck
from serve_app.engine.grammars import Grammar
from serve_app.engine.stream_interval import StreamInterval
from serve_app.engine.vllm.refusal import RefusedError
from serve_app.relay.usage import Tokens
from tests.serve_app.engine.vllm_doubles import BLOCK, CONTEXT, LIMIT_S, TEN, Script, gated, output, run

DELTA = RequestOutputKind.DELTA


@pytest.fixture
async def batcher() -> AsyncIterator[ContinuousBatcher]:
    async with ContinuousBatcher(capacity=1024, max_queue_size=1) as batcher:
        yield batcher


@pytest.mark.parametrize(
    ("params", "cost"),
    [
        # 10 + 4 tokens are one block of 16; 10 + 7 are two.
        ({"max_tokens": 4}, BLOCK),
        ({"max_tokens": 7}, 2 * BLOCK),
        ({"max_tokens": 7, "n": 3}, 6 * BLOCK),
        # Without a limit of its own a text may fill the context; never more.
        ({"max_tokens": None}, CONTEXT),
        ({"max_tokens": 1000}, CONTEXT),
    ],
)
async def test_a_request_reserves_the_blocks_of_its_prompt_and_its_longest_output(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, params: dict[str, Any], cost: int
) -> None:
    script = Script(output(1), output(finish="stop"))
    await run(gated(monkeypatch, script, batcher), params=SamplingParams(**params))
    assert script.costs == [cost]
    assert batcher.stats.running_cost == 0


async def test_a_request_that_is_closed_early_frees_its_slot_and_its_engine(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1), output(2))
    results = gated(monkeypatch, script, batcher).generate(TEN, SamplingParams(max_tokens=4), "r")
    await anext(results)
    assert batcher.stats.running == 1
    await results.aclose()
    assert batcher.stats.running == 0
    assert script.closed == 1


TUPLE: dict[str, Any] = {"type": "array", "items": [{"type": "string"}]}


@pytest.mark.parametrize(
    ("outputs", "refused"),
    [
        ({"json": TUPLE}, "text.format: this json can't be compiled: items must be"),
        ({"regex": "("}, "structured_outputs: this regex can't be compiled"),
        ({"choice": ["a", "\U0001f600"]}, ""),
        ({"json_object": True}, ""),
        ({"grammar": 'start: "a"'}, ""),
    ],
)
async def test_a_grammar_is_checked_as_the_engine_will_compile_it_before_the_request_is_admitted(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, outputs: dict[str, Any], refused: str
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher)
    llm.grammars = check = GrammarCheck(5.0, 5.0)
    stated = (Grammar("json", json.dumps(TUPLE), "text.format"),) if "json" in outputs else ()
    result = AdmissionResult()
    set_current(AdmissionRequest(grammars=stated), result)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**outputs))
    try:
        async with asyncio.timeout(60):
            if refused:
                with pytest.raises(RefusedError) as caught:
                    await run(llm, params=params)
                assert caught.value.error.status == 400
                assert caught.value.error.message.startswith(refused)
                assert result.refusal is caught.value.error
            else:
                await run(llm, params=params)
    finally:
        await check.stop()
    assert len(script.calls) == (0 if refused else 1)
    assert result.constrained


@pytest.mark.parametrize("by_priority", [False, True])
async def test_vllm_gets_the_tier_of_the_request_where_it_schedules_by_priority(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, by_priority: bool
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher, by_priority=by_priority)
    set_current(AdmissionRequest(Scheduling(priority=1)), AdmissionResult())
    async for _ in llm.generate(TEN, SamplingParams(max_tokens=4), "r", priority=-5):
        pass
    assert script.calls[0]["priority"] == (1 if by_priority else -5)


@pytest.mark.parametrize(
    ("asked", "engines", "stop", "paced"),
    [
        (None, 1, ["x"], True),
        (None, 4, ["x"], False),
        (1, 1, ["x"], False),
        (7, 7, ["x"], False),
        # The engine holds the tokens of this one.
        (None, 1, [], False),
    ],
)
async def test_the_pieces_of_a_stream_keep_the_rate_unless_an_interval_is_set(
    monkeypatch: pytest.MonkeyPatch,
    batcher: ContinuousBatcher,
    asked: int | None,
    engines: int,
    stop: list[str],
    paced: bool,
) -> None:
    llm: Any = gated(monkeypatch, Script(output(1), output(2), output(3, finish="stop")), batcher)
    state = SimpleNamespace(
        stream_interval=engines,
        sent_tokens_offset=0,
        detokenizer=SimpleNamespace(num_output_tokens=lambda: 2),
    )
    llm.output_processor.external_req_ids = {"r": ["r-0", "r-1"]}
    llm.output_processor.request_states = {"r-0": state}
    params = SamplingParams(max_tokens=4, output_kind=DELTA, stop=stop)
    params.stream_interval = asked
    await run(llm, params=params)
    assert isinstance(state.stream_interval, StreamInterval) == paced
    assert state.sent_tokens_offset == (2 if paced else 0)
    assert llm.piece_rate.streams == 0


async def test_an_embedding_request_reserves_its_prompt(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(SimpleNamespace())
    llm: Any = gated(monkeypatch, script, batcher)
    async for _ in llm.encode(tokens_input(list(range(17))), SimpleNamespace(), "r"):
        pass
    assert script.costs == [2 * BLOCK]
    # Its result counts as the first token, for goals.
    assert batcher.stats.output_tokens == 0
    assert batcher.stats.ttft_p50_s is not None


async def test_a_prompt_of_an_encoder_reserves_its_tokens_alone(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(SimpleNamespace())
    llm: Any = gated(monkeypatch, script, batcher)
    # vLLM's own block, where there is no KV cache.
    llm.vllm_config.cache_config.num_gpu_blocks = 1
    async for _ in llm.encode(tokens_input(list(range(17))), SimpleNamespace(), "r"):
        pass
    assert script.costs == [17]


async def test_the_texts_of_an_embedding_are_as_many_records_with_the_priority_of_their_tier(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(SimpleNamespace())
    llm: Any = gated(monkeypatch, script, batcher, by_priority=True)
    result = AdmissionResult()
    # The queue has one place; texts after the first one wait for it.
    set_current(AdmissionRequest(Scheduling(priority=10, tenant="a")), result)

    async def embed(text: int) -> None:
        async for _ in llm.encode(tokens_input([1] * text), SimpleNamespace(), f"r-{text}", priority=-5):
            pass

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(embed(text) for text in (3, 4, 5)))
    assert [call["priority"] for call in script.calls] == [10, 10, 10]
    assert (batcher.stats.total_completed, result.asked) == (3, 3)
    assert (result.usage.prompt_tokens, result.usage.output_tokens) == (12, 0)


@pytest.mark.parametrize("prompt", ["a text", {"type": "multimodal"}])
async def test_a_prompt_of_unknown_length_reserves_the_context(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, prompt: Any
) -> None:
    script = Script(output(1, finish="stop"))
    await run(gated(monkeypatch, script, batcher), prompt)
    assert script.costs == [CONTEXT]


@pytest.mark.parametrize(("asked", "most", "given"), [(None, 5, 5), (9, 5, 5), (3, 5, 3), (9, None, 9)])
async def test_an_answer_that_states_no_limit_gets_that_of_the_ingress(
    monkeypatch: pytest.MonkeyPatch,
    batcher: ContinuousBatcher,
    asked: int | None,
    most: int | None,
    given: int,
) -> None:
    script = Script(output(1, finish="stop"))
    set_current(AdmissionRequest(max_tokens=most), AdmissionResult())
    await run(gated(monkeypatch, script, batcher), params=SamplingParams(max_tokens=asked))
    assert script.calls[0]["params"].max_tokens == given


async def test_answers_that_never_fit_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher)
    result = AdmissionResult()
    set_current(AdmissionRequest(), result)
    # The capacity is eight contexts.
    with pytest.raises(RefusedError) as caught:
        await run(llm, params=SamplingParams(n=9, max_tokens=None))
    assert caught.value.error is result.refusal
    assert (caught.value.error.status, caught.value.error.param) == (400, "n")
    assert "lower n or max_tokens" in caught.value.error.message
    assert script.calls == []
    await run(llm, params=SamplingParams(n=8, max_tokens=None))
    await run(llm, params=SamplingParams(n=9, max_tokens=4))


async def test_more_logprobs_of_a_prompt_than_the_loop_can_make_are_refused(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher)
    set_current(AdmissionRequest(), AdmissionResult())
    # Ten tokens; the bound is 100.
    await run(llm, params=SamplingParams(max_tokens=4, prompt_logprobs=9))
    with pytest.raises(RefusedError, match=r"10 prompt tokens with 11 logprobs each.*max_prompt_logprobs"):
        await run(llm, params=SamplingParams(max_tokens=4, prompt_logprobs=10))
    with pytest.raises(RefusedError, match="10 prompt tokens with 1000 logprobs each"):
        await run(llm, params=SamplingParams(max_tokens=4, prompt_logprobs=-1))
    assert len(script.calls) == 1
    assert batcher.stats.total_submitted == 1


async def test_each_answer_counts_among_the_logprobs_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher)
    set_current(AdmissionRequest(), AdmissionResult())
    # Ten tokens; the bound is 100.
    await run(llm, params=SamplingParams(n=2, max_tokens=4, prompt_logprobs=4))
    with pytest.raises(RefusedError, match="10 prompt tokens with 5 logprobs each, for each of 3 answers"):
        await run(llm, params=SamplingParams(n=3, max_tokens=4, prompt_logprobs=4))
    assert len(script.calls) == 1


async def test_more_ids_than_the_engine_has_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1, finish="stop"))
    llm: Any = gated(monkeypatch, script, batcher)
    result = AdmissionResult()
    set_current(AdmissionRequest(), result)
    params = SamplingParams(max_tokens=4, allowed_token_ids=list(range(1025)))
    # vLLM's older runner has room for all.
    await run(llm, params=params)
    llm.vllm_config.use_v2_model_runner = True
    with pytest.raises(RefusedError, match="allowed_token_ids: 1025 token ids") as caught:
        await run(llm, params=params)
    assert caught.value.error is result.refusal
    assert len(script.calls) == 1


async def test_the_seeds_of_several_answers_are_numbers_that_the_engine_can_hold(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher)
    for seed in (2**63 - 1, 7):
        await run(llm, params=SamplingParams(n=3, max_tokens=4, seed=seed))
    assert [call["params"].seed for call in script.calls] == [2**63 - 3, 7]


async def test_a_prompt_that_is_longer_than_the_context_is_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    # As of one whose images take more tokens than it seemed.
    script = Script(VLLMValidationError("longer than the maximum model length"))
    llm = gated(monkeypatch, script, batcher)
    with pytest.raises(VLLMValidationError, match="maximum model length"):
        await run(llm, tokens_input(list(range(CONTEXT + 70))))
    assert script.costs == [CONTEXT]


async def test_the_engine_gets_no_more_of_an_id_than_tells_its_prompts_apart(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher)
    for request_id in ("x" * 10_000_000 + "-7", "short"):
        async for _ in llm.generate(TEN, SamplingParams(max_tokens=4), request_id):
            pass
    assert [call["request_id"] for call in script.calls] == ["x" * 254 + "-7", "short"]


def searched(llm: Any, steps: int = 1, **params: Any) -> AsyncGenerator[Any, None]:
    """Return the results of a beam search that asks the engine so many times."""

    async def search(*, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        for _ in range(steps):
            await asyncio.gather(*(run(llm, prompt) for _ in range(params.beam_width)))
        yield output(*range(params.max_tokens), finish="length")

    results: AsyncGenerator[Any, None] = llm.beam_search(
        search, prompt=TEN, params=BeamSearchParams(**params), request_id="r"
    )
    return results


async def test_a_beam_search_is_admitted_once_with_all_its_beams(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher)
    result = AdmissionResult()
    # Its deadline is met when it starts, and a full queue doesn't refuse its later tokens.
    set_current(AdmissionRequest(deadline=time.monotonic() + LIMIT_S), result)
    async with asyncio.timeout(LIMIT_S):
        results = searched(llm, steps=3, beam_width=4, max_tokens=7)
        assert [len(each.outputs[0].token_ids) async for each in results] == [7]
    # 10 + 7 tokens are two blocks.
    assert script.costs == [4 * 2 * BLOCK] * 12
    stats = batcher.stats
    # Four beams are four records.
    assert (stats.total_completed, stats.running_cost) == (4, 0)
    assert result.usage.prompt_tokens == 10
    assert result.usage.output_tokens == 7
    # All that the engine has sampled: a token for each beam and step.
    assert result.usage.counted == Tokens(12 * 10, 0, 12)


async def test_a_beam_search_that_never_fits_is_refused(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher)
    set_current(AdmissionRequest(), AdmissionResult())
    with pytest.raises(RefusedError, match="lower n or max_tokens"):
        await anext(searched(llm, beam_width=9, max_tokens=CONTEXT))
    set_current(AdmissionRequest(max_tokens=4), AdmissionResult())
    assert len((await anext(searched(llm, beam_width=9, max_tokens=CONTEXT))).outputs[0].token_ids) == 4


async def test_one_answer_as_large_as_the_engine_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ContinuousBatcher(capacity=CONTEXT - BLOCK, oversize="alone") as batcher:
        script = Script(output(1, finish="stop"))
        await run(gated(monkeypatch, script, batcher), params=SamplingParams(max_tokens=None))
        assert len(script.calls) == 1


class Core:
    """vLLM's client of its engine's process, which can't send a request after the first `sent`."""

    def __init__(self, sent: int) -> None:
        self.sent = sent
        self.aborted: list[str] = []

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.sent -= 1
        if self.sent < 0:
            raise OverflowError("can't serialize ints >= 2**64")

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


@pytest.mark.parametrize("answers", [1, 3])
async def test_a_request_that_never_reaches_the_engine_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, answers: int
) -> None:
    llm: Any = gated(monkeypatch, Script(), batcher)
    processor = llm.output_processor = OutputProcessor(None, log_stats=False)
    llm.engine_core = Core(sent=answers - 1)
    llm.check_admission = lambda **options: None
    llm.log_requests = False
    params = SamplingParams(n=answers, detokenize=False)

    def request(request_id: str) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id, [1, 2], None, params, None, 0.0, None, None, None, external_req_id="r"
        )

    parent = ParentRequest(request("parent")) if answers > 1 else None
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "r")

    async def add() -> None:
        for index in range(answers):
            name = parent.get_child_info(index)[0] if parent else "alone"
            await llm._add_request(request(name), None, parent, index, queue)

    with pytest.raises(OverflowError):
        await add()
    assert not processor.has_unfinished_requests()
    assert not processor.parent_requests
    # The engine may have got some of them.
    assert len(llm.engine_core.aborted) == answers
