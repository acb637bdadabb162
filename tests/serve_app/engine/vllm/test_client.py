"""vLLM's engine client: each prompt of a job runs in its slot, within its bounds."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState

from serve_app.api.errors import RequestError
from serve_app.engine.job import Job
from serve_app.settings.models import GoalSettings
from serve_app.wire.usage import Tokens
from tests.batcher.virtual import blocked, virtual
from tests.serve_app.engine.engine_doubles import BLOCK, CONTEXT, MAX_VALUES, PlayedAdapters, new_job, opened
from tests.serve_app.engine.vllm.features import GOALS
from tests.serve_app.engine.vllm_doubles import (
    TEN,
    HeldScript,
    Script,
    admitted,
    gated,
    output,
    run,
    stepped,
)

DELTA = RequestOutputKind.DELTA


def refused(job: Job) -> tuple[int, str | None]:
    """Return the status and the field of the error that a job's client gets."""
    assert job.failure is not None
    return job.failure.status, job.failure.param


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
@virtual
async def test_a_prompt_holds_the_blocks_of_itself_and_its_longest_answers_when_vllm_gets_it(
    params: dict[str, Any], cost: int
) -> None:
    async with opened() as site:
        script = Script(output(1), output(finish="stop"))
        # The bound with which the job was admitted makes no difference.
        job = new_job(facts={"prompt": None, "answers": params.get("n", 1)})
        await run(gated(script, site), params=SamplingParams(**params), job=job)
        assert script.costs == [cost]
        site.check_free()


@virtual
async def test_a_prompt_that_is_closed_early_frees_its_slot_and_its_engine() -> None:
    async with opened() as site:
        script = Script(output(1), output(2))
        llm = gated(script, site)
        await admitted(llm)
        results = llm.generate(TEN, SamplingParams(max_tokens=4), "r")
        await anext(results)
        assert site.batcher.stats.running == 1
        await results.aclose()
        assert script.closed == 1
        assert site.batcher.stats.total_cancelled == 1
        site.check_free()


@virtual
async def test_the_engine_s_own_work_passes_the_door() -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        llm = gated(script, site)
        assert [each async for each in llm.generate(TEN, SamplingParams(max_tokens=4), "warm-up")]
        pooling: Any = SimpleNamespace()
        assert [each async for each in llm.encode(TEN, pooling, "warm-up")]
        assert (len(script.calls), site.batcher.stats.total_submitted) == (2, 0)


# Several prompts.


@virtual
async def test_a_list_longer_than_the_queue_waits_behind_its_first_prompt() -> None:
    async with opened(max_running=1, max_queue_size=1) as site:
        script = HeldScript()
        llm = gated(script, site)
        job = await admitted(llm)
        prompts = [asyncio.ensure_future(run(llm, job=job, id=f"r-{number}")) for number in range(4)]
        await blocked()
        assert script.started == ["r-0"]
        assert (site.batcher.stats.queue_depth, site.batcher.stats.outside) == (1, 2)
        script.go.set()
        assert [len(results) for results in await asyncio.gather(*prompts)] == [1] * 4
        site.check_free()


@virtual
async def test_a_further_prompt_that_can_not_run_is_the_failure_of_its_job() -> None:
    async with opened(max_running=1) as site:
        script = HeldScript()
        llm = gated(script, site)
        job = await admitted(llm)
        first, second = [asyncio.ensure_future(run(llm, job=job)) for _ in range(2)]
        await blocked()
        stopping = asyncio.ensure_future(site.batcher.stop(drain=False))
        with pytest.raises(GracefulHTTPError):
            await second
        assert refused(job)[0] == 503
        script.go.set()
        await asyncio.gather(first, stopping)


@pytest.mark.parametrize("change", ["removed", "replaced"])
@virtual
async def test_a_prompt_whose_adapter_changed_while_it_waited_is_a_404(change: str) -> None:
    async with opened(adapters=PlayedAdapters(1), max_running=1) as site:
        script = HeldScript()
        llm = gated(script, site)
        name = "demo:words"
        lora: Any = SimpleNamespace(lora_name=name)
        site.adapters.requests[name] = lora
        job = await admitted(llm, new_job(adapter=name))
        options: dict[str, Any] = {"lora_request": lora}

        async def ask() -> None:
            async for _ in llm.generate(TEN, SamplingParams(max_tokens=4), "r", **options):
                pass

        first, second = [asyncio.ensure_future(ask()) for _ in range(2)]
        await blocked()
        if change == "removed":
            del site.adapters.requests[name]
        else:
            site.adapters.requests[name] = SimpleNamespace(lora_name=name)
        script.go.set()
        await first
        with pytest.raises(GracefulHTTPError):
            await second
        assert refused(job)[0] == 404
        assert len(script.calls) == 1
        site.check_free()


# Grammars.


@pytest.mark.parametrize(
    ("outputs", "refusal"),
    [
        ({"regex": "("}, (400, "structured_outputs.regex")),
        ({"json_object": False}, (400, "structured_outputs.json_object")),
        ({"choice": ["a", "b"]}, None),
        ({"json_object": True}, None),
    ],
)
@virtual
async def test_a_grammar_is_compiled_before_the_engine_gets_it(
    outputs: dict[str, Any], refusal: tuple[int, str] | None
) -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        llm = gated(script, site)
        job = await admitted(llm)
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**outputs))
        with suppress(VLLMValidationError):
            await run(llm, params=params, job=job)
        assert job.constrained
        assert (refused(job) if job.failure else None) == refusal
        assert len(script.calls) == (refusal is None)
        assert site.batcher.stats.running == 0


# Requests as vLLM gets them.


@pytest.mark.parametrize("by_priority", [False, True])
@virtual
async def test_vllm_gets_the_tier_of_the_job_where_it_schedules_by_priority(by_priority: bool) -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        llm = gated(script, site, by_priority=by_priority)
        await admitted(llm, new_job(priority=1))
        async for _ in llm.generate(TEN, SamplingParams(max_tokens=4), "r", priority=-5):
            pass
        assert script.calls[0]["priority"] == (1 if by_priority else -5)


GOALS_OF_CONFIG = GoalSettings(ttft_p99_s=200.0, tpot_p99_s=0.05)


@pytest.mark.parametrize(
    ("goals", "priority", "promoted", "given"),
    [
        (GOALS_OF_CONFIG, 0, False, True),
        (GOALS_OF_CONFIG, -1, False, True),
        (GOALS_OF_CONFIG, 1, False, False),
        (GOALS_OF_CONFIG, 1, True, True),
        (None, 0, False, False),
    ],
)
@pytest.mark.parametrize("own", [None, 5, (1e-9, 1e-9)])
@virtual
async def test_the_scheduler_gets_the_goals_of_the_config_and_none_of_a_client(
    goals: GoalSettings | None, priority: int, promoted: bool, given: bool, own: Any
) -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        llm = gated(script, site, by_priority=True)
        llm.goals = goals
        job = await admitted(llm, new_job(priority=priority))
        assert job.slot is not None
        job.slot.promoted = promoted
        # The time since the arrival here is part of the age.
        job.began -= 40.0
        job.request = replace(job.request, arrived_at=time.time() - 40.0)
        params = SamplingParams(max_tokens=4, extra_args={"own": 1} | ({GOALS: own} if own else {}))
        async for _ in llm.generate(TEN, params, "r"):
            pass
        assert script.calls[0]["priority"] == (0 if promoted else priority)
        told = dict(params.extra_args or {})
        assert told.pop(GOALS, None) == ((pytest.approx(160.0, abs=20.0), 0.05) if given else None)
        assert told == {"own": 1}


MOVE = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1}


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize(
    ("key", "value", "refusal"),
    [
        ("router", MOVE, ""),
        ("router", "x", "must be an object"),
        ("router", None, "must be an object"),
        ("ada", MOVE, "is taken only from the API keys in the model's setting `transfer_keys`"),
        ("ada", 5, "is taken only from"),
        # Without keys, over the handle and in a row that nobody's key sent.
        ("", MOVE, "is taken only from"),
    ],
)
@virtual
async def test_kv_caches_are_moved_only_for_the_keys_that_the_config_names(
    name: str, key: str, value: Any, refusal: str
) -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        llm = gated(script, site)
        llm.transfer_keys = ("router",)
        job = new_job()
        job.request = replace(job.request, key=key)
        await admitted(llm, job)
        generated = llm.generate(TEN, SamplingParams(max_tokens=4, extra_args={name: value}), "r")
        if not refusal:
            assert len([each async for each in generated]) == 1
            return
        with pytest.raises(VLLMValidationError, match=f"{name}: {refusal}"):
            await anext(generated)
        assert refused(job) == (400, name)
        assert script.calls == []
        assert job.slot is not None
        job.slot.release()


@pytest.mark.parametrize(("key", "told"), [("router", 1), ("ada", 0), ("", 0)])
@virtual
async def test_a_refused_request_frees_blocks_elsewhere_only_for_those_keys(key: str, told: int) -> None:
    async with opened() as site:
        script = Script()
        llm = gated(script, site)
        llm.transfer_keys = ("router",)
        job = new_job()
        job.request = replace(job.request, key=key)
        await admitted(llm, job)
        await llm.notify_kv_transfer_request_rejected("r", MOVE)
        assert script.rejected == [MOVE] * told
        assert job.slot is not None
        job.slot.release()


@pytest.mark.parametrize(
    ("goals", "age_s", "left"),
    [
        ({"ttft_p99_s": 200.0}, 60.0, (140.0, 0.0)),
        ({"ttft_p99_s": 200.0}, 190.0, (100.0, 0.0)),
        ({"tpot_p99_s": 0.03}, 60.0, (0.0, 0.03)),
    ],
    ids=["age", "late already", "per token alone"],
)
@virtual
async def test_the_age_of_a_request_leaves_less_of_its_goal(
    goals: dict[str, float], age_s: float, left: tuple[float, float]
) -> None:
    async with opened() as site:
        llm = gated(Script(output(1, finish="stop")), site, by_priority=True)
        llm.goals = GoalSettings.model_validate(goals)
        job = await admitted(llm, new_job())
        job.request = replace(job.request, arrived_at=time.time() - age_s)
        params = SamplingParams(max_tokens=4)
        async for _ in llm.generate(TEN, params, "r"):
            pass
        first_s, per_token_s = (params.extra_args or {})[GOALS]
        assert (first_s, per_token_s) == (pytest.approx(left[0], abs=20.0), left[1])


@virtual
async def test_the_first_token_of_a_stream_is_timed() -> None:
    async with opened() as site:
        params = SamplingParams(max_tokens=4, output_kind=DELTA)
        await run(gated(Script(output(1), output(2, finish="stop")), site), params=params)
        assert site.batcher.stats.ttft_p50_s is not None
        assert site.batcher.stats.output_tokens == 2


@pytest.mark.parametrize(("asked", "most", "given"), [(None, 5, 5), (9, 5, 5), (3, 5, 3), (9, None, 9)])
@virtual
async def test_an_answer_that_states_no_limit_gets_that_of_the_ingress(
    asked: int | None, most: int | None, given: int
) -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        job = new_job()
        job.request = replace(job.request, max_tokens=most)
        await run(gated(script, site), params=SamplingParams(max_tokens=asked), job=job)
        assert script.calls[0]["params"].max_tokens == given


class Letters:
    """Stands for a tokenizer: each letter is a token."""

    max_token_id = 255

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


@virtual
async def test_bad_words_have_no_more_tokens_than_the_sampler_has_room_for() -> None:
    async with opened() as site:
        llm = gated(Script(output(1, finish="stop")), site)
        llm.input_processor.tokenizer = Letters()
        await run(llm, params=SamplingParams(max_tokens=4, bad_words=["a" * 1000, "b" * 24]))
        job = await admitted(llm)
        with pytest.raises(VLLMValidationError, match="bad_words: has 1025 tokens"):
            await run(llm, params=SamplingParams(max_tokens=4, bad_words=["a" * 1025]), job=job)
        assert refused(job) == (400, "bad_words")
        large = SamplingParams(bad_words=["a" * 1025])
        large.update_from_tokenizer(Letters())
        state: Any = SimpleNamespace(num_bad_words=SimpleNamespace(np=[0]))
        with pytest.raises(ValueError, match="Too many total bad word tokens"):
            BadWordsState.add_request(state, 0, large)


@virtual
async def test_the_engine_gets_no_more_of_an_id_than_tells_its_prompts_apart() -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        llm = gated(script, site)
        for id in ("x" * 10_000_000 + "-7", "short"):
            await run(llm, id=id)
        assert [call["request_id"] for call in script.calls] == ["x" * 254 + "-7", "short"]


# Bounds.


@pytest.mark.parametrize("prompt", ["a text", {"type": "multimodal"}])
@virtual
async def test_a_prompt_of_unknown_length_holds_the_context(prompt: Any) -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        await run(gated(script, site), prompt)
        assert script.costs == [CONTEXT]


@virtual
async def test_a_prompt_that_is_longer_than_the_context_is_left_to_vllm() -> None:
    async with opened() as site:
        # As of one whose images take more tokens than it seemed.
        script = Script(VLLMValidationError("longer than the maximum model length"))
        with pytest.raises(VLLMValidationError, match="maximum model length"):
            await run(gated(script, site), tokens_input(list(range(CONTEXT + 70))))
        assert script.costs == [CONTEXT]
        site.check_free()


@virtual
async def test_answers_that_never_fit_together_are_refused() -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        llm = gated(script, site)
        job = new_job(facts={"answers": 9})
        # The capacity is eight contexts.
        with pytest.raises(VLLMValidationError, match="lower n or max_tokens"):
            await run(llm, params=SamplingParams(n=9, max_tokens=None), job=job)
        assert refused(job) == (400, "n")
        assert script.calls == []
        await run(llm, params=SamplingParams(n=8, max_tokens=None))
        await run(llm, params=SamplingParams(n=9, max_tokens=4))
        site.check_free()


@virtual
async def test_one_answer_as_large_as_the_engine_runs_alone() -> None:
    async with opened(capacity=CONTEXT - BLOCK) as site:
        script = Script(output(1, finish="stop"))
        await run(gated(script, site), params=SamplingParams(max_tokens=None))
        assert len(script.calls) == 1


@virtual
@pytest.mark.parametrize(
    ("params", "values"),
    [
        ({"prompt_logprobs": 9}, 101),
        ({"prompt_logprobs": 10}, 111),
        ({"prompt_logprobs": -1}, 10_001),
        ({"n": 2, "prompt_logprobs": 4}, 102),
        ({"n": 3, "prompt_logprobs": 4}, 153),
        ({"logprobs": 20}, 85),
        ({"n": 2, "logprobs": 20}, 170),
        ({"logprobs": 20, "prompt_logprobs": 1}, 105),
        ({"logprobs": 20, "prompt_logprobs": 2}, 115),
        ({"logprobs": -1}, 4_001),
        ({"logprob_token_ids": list(range(30))}, 125),
        ({"n": 2, "logprobs": 20, "output_kind": RequestOutputKind.DELTA}, 2),
    ],
)
async def test_an_answer_with_more_values_than_the_loop_may_make_is_refused(
    params: dict[str, Any], values: int
) -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        llm = gated(script, site)
        job = new_job()
        # Ten tokens, and four of the answer; the bound is 105.
        if values <= MAX_VALUES:
            await run(llm, params=SamplingParams(max_tokens=4, **params), job=job)
        else:
            reason = f"{values} values, and at most {MAX_VALUES} are allowed .max_answer_values"
            with pytest.raises(VLLMValidationError, match=reason):
                await run(llm, params=SamplingParams(max_tokens=4, **params), job=job)
            assert refused(job) == (400, None)
        assert len(script.calls) == (values <= MAX_VALUES)
        site.check_free()


@virtual
async def test_the_prompts_of_a_request_have_one_bound_before_any_of_them_runs() -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        llm = gated(script, site)
        job = await admitted(llm, new_job(facts={"prompts": 3}))
        params = SamplingParams(max_tokens=4, prompt_logprobs=4)
        for index in range(2):
            llm.generate(TEN, params, f"r-{index}")
        with pytest.raises(VLLMValidationError, match="153 values"):
            llm.generate(TEN, params, "r-2")
        assert script.calls == []
        assert job.slot is not None
        job.slot.release()
        site.check_free()


@virtual
async def test_an_answer_without_a_stated_length_is_as_long_as_the_bound_allows() -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        llm = gated(script, site)
        for stated, length in ((None, 20), (4, 4)):
            params = SamplingParams(max_tokens=stated or CONTEXT - 10, logprobs=4)
            await run(llm, params=params, job=new_job(facts={"output": stated}))
            assert script.calls[-1]["params"].max_tokens == length


@virtual
async def test_an_answer_that_states_too_many_values_is_refused_at_the_door() -> None:
    async with opened() as site:
        with pytest.raises(RequestError, match="106 values") as caught:
            await site.door.admit(new_job(facts={"values": MAX_VALUES + 1}))
        assert caught.value.status == 400
        site.check_free()


# Beam searches.


def searched(llm: Any, job: Job, steps: int = 1, **params: Any) -> AsyncGenerator[Any, None]:
    """Return the results of a beam search that asks the engine so many times."""

    async def search(*, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        for _ in range(steps):
            await asyncio.gather(*(run(llm, prompt, job=job) for _ in range(params.beam_width)))
        yield output(*range(params.max_tokens), finish="length")

    results: AsyncGenerator[Any, None] = llm.beam_search(
        search, prompt=TEN, params=BeamSearchParams(**params), request_id="r"
    )
    return results


@virtual
async def test_a_beam_search_is_admitted_once_with_all_its_beams() -> None:
    async with opened(max_queue_size=1) as site:
        script = Script(output(1, finish="stop"))
        llm = gated(script, site)
        # Its deadline is met when it starts, and a full queue doesn't refuse its later tokens.
        job = await admitted(llm, new_job(facts={"answers": 4}, queue_timeout_s=1.0))
        results = searched(llm, job, steps=3, beam_width=4, max_tokens=7)
        assert [len(each.outputs[0].token_ids) async for each in results] == [7]
        # 10 + 7 tokens are two blocks.
        assert script.costs == [4 * 2 * BLOCK] * 12
        # Four beams are four records.
        assert site.batcher.stats.total_completed == 4
        # All that the engine has sampled: a token for each beam and step.
        assert job.usage.counted == Tokens(10, 0, 12)
        site.check_free()


@virtual
async def test_the_tokens_of_a_beam_search_have_the_tier_of_the_job() -> None:
    async with opened() as site:
        script = Script(output(1, finish="stop"))
        llm = gated(script, site, by_priority=True)
        job = await admitted(llm, new_job(facts={"answers": 2}, priority=1))
        assert [each async for each in searched(llm, job, beam_width=2, max_tokens=2)]
        assert [call["priority"] for call in script.calls] == [1, 1]


@virtual
async def test_a_beam_search_that_never_fits_is_refused() -> None:
    async with opened() as site:
        llm = gated(Script(output(1, finish="stop")), site)
        job = await admitted(llm, new_job(facts={"answers": 9}))
        with pytest.raises(VLLMValidationError, match="lower n or max_tokens"):
            await anext(searched(llm, job, beam_width=9, max_tokens=CONTEXT))
        assert refused(job) == (400, "n")
        assert job.slot
        job.slot.release()
        job = new_job(facts={"answers": 9})
        job.request = replace(job.request, max_tokens=4)
        await admitted(llm, job)
        results = searched(llm, job, beam_width=9, max_tokens=CONTEXT)
        assert [len(each.outputs[0].token_ids) async for each in results] == [4]


# Pooling.


async def embed(llm: Any, length: int, **options: Any) -> None:
    async for _ in llm.encode(tokens_input([1] * length), SimpleNamespace(), f"r-{length}", **options):
        pass


@virtual
async def test_an_embedding_holds_its_prompt() -> None:
    async with opened() as site:
        script = Script(SimpleNamespace())
        llm = gated(script, site)
        await admitted(llm)
        await embed(llm, 17)
        assert script.costs == [2 * BLOCK]
        # Its result counts as the first token.
        assert site.batcher.stats.output_tokens == 0
        assert site.batcher.stats.ttft_p50_s is not None


@virtual
async def test_a_prompt_of_an_encoder_holds_its_tokens_alone() -> None:
    async with opened() as site:
        script = Script(SimpleNamespace())
        llm: Any = gated(script, site)
        # vLLM's own block, where there is no KV cache.
        llm.vllm_config.cache_config.num_gpu_blocks = 1
        await admitted(llm)
        await embed(llm, 17)
        assert script.costs == [17]


@virtual
async def test_the_texts_of_an_embedding_are_as_many_records_with_the_priority_of_their_tier() -> None:
    # The queue has one place; texts after the first one wait for it.
    async with opened(max_running=1, max_queue_size=1) as site:
        script = Script(SimpleNamespace())
        llm = gated(script, site, by_priority=True)
        await admitted(llm, new_job(priority=10, tenant="a"))
        await asyncio.gather(*(embed(llm, length, priority=-5) for length in (3, 4, 5)))
        assert [call["priority"] for call in script.calls] == [10, 10, 10]
        assert site.batcher.stats.total_completed == 3
        site.check_free()


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
    answers: int,
) -> None:
    llm: Any = gated(Script())
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


# The quotas


@virtual
async def test_the_prompts_of_a_job_go_to_the_engine_once_its_quotas_cover_their_tokens() -> None:
    """The job has a reservation for five tokens of prompts."""
    more: list[int] = []

    async def reserve(tokens: int) -> None:
        if sum(more) + tokens > 2:
            raise RequestError(429, "rate_limit_error", "used up", retry_after_s=1.0)
        more.append(tokens)

    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        job = await admitted(llm, new_job(facts={"prompt": 5, "prompts": 3}))
        job.more = reserve
        for prompt, asked in (([1, 2, 3], []), ([1, 2, 3, 4], [2])):
            results = llm.generate(tokens_input(prompt), SamplingParams(), "r")
            task = asyncio.ensure_future(anext(results))
            await blocked()
            engine.step(finish=True)
            await task
            await results.aclose()
            assert more == asked
        with pytest.raises(GracefulHTTPError):
            await anext(llm.generate(tokens_input([1]), SamplingParams(), "r"))
        assert (len(engine.prompts), job.failure and job.failure.status) == (2, 429)
        site.check_free()


# The prefix cache


async def salts(tenant: str, own: str | None = None, *, salted: bool = True, **more: Any) -> list[Any]:
    """Return the salts of the prompts that the engine gets for a completion and an embedding of a tenant."""
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        llm.salts = salted
        prompt, sampling = tokens_input([1, 2, 3], cache_salt=own), SamplingParams(detokenize=False)
        works: list[tuple[Any, Any]] = [
            (lambda: llm.generate(prompt, sampling, "r"), None),
            (lambda: llm.encode(prompt, PoolingParams(task="embed"), "r"), torch.ones(1)),
        ]
        for work, made in works:
            await admitted(llm, new_job(tenant=tenant, **more))
            results = work()
            task = asyncio.ensure_future(anext(results))
            await blocked()
            engine.step(finish=True, output=made)
            await task
            await results.aclose()
        return [prompt.get("cache_salt") for prompt in engine.prompts]


@virtual
async def test_a_tenant_shares_the_prefix_cache_with_itself_alone() -> None:
    """Live, in a batch, and with a salt of its own; a salt can't be written that is another tenant's."""
    kinds = [await salts(*each) for each in (("acme",), ("acme", "s"), ("b",), ("acmes",), ("acme", "\ns"))]
    assert all(one == two for one, two in kinds), "routes differ"
    found = [one for one, _ in kinds]
    assert len(set(found)) == len(found)
    # vLLM's connectors take no others.
    assert all(re.fullmatch("[0-9a-f]{32}", salt) for salt in found)
    assert await salts("acme", priority=1) == kinds[0]
    assert await salts("b", found[0]) != kinds[0]


@virtual
async def test_tenants_that_nobody_checks_share_the_prefix_cache() -> None:
    assert await salts("acme", salted=False) == [None, None]
    assert await salts("acme", "s", salted=False) == ["s", "s"]
