"""Lists of prompts: each is admitted, tokenized and completed by itself, on an engine that a test scripts."""

import asyncio
from typing import Any

import pytest
from jinja2 import TemplateError
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from serve_app.api.errors import RequestError
from serve_app.api.protocol import GenerateRequest, GenerateResponse
from serve_app.engine.job import WAITING, Job
from serve_app.engine.vllm.generate import GenerateCalls
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_MODEL
from tests.batcher.virtual import blocked, now, virtual
from tests.serve_app.engine.engine_doubles import BLOCK, CONTEXT, PlayedAdapters, Site, new_job, opened
from tests.serve_app.engine.vllm_doubles import LIMIT_S, HeldScript, Script, gated, output

TOKENIZER = get_tokenizer(LLMSettings(id="demo", source=DEMO_MODEL).path)
"""It makes a token of each character of these texts."""

WORDS, SUMS = "demo:words", "demo:sums"


def of_vllm() -> None:
    """Raise, in a module of vLLM's, what a chat template raises."""
    module: dict[str, Any] = {"__name__": "vllm.renderers.hf", "TemplateError": TemplateError}
    exec("def render(): raise TemplateError('roles must alternate')", module)
    module["render"]()


class Renderer:
    """Stands for vLLM's renderer: the text of the last message says what it does."""

    async def render_chat(self, request: Any) -> Any:
        match request.messages[-1]["content"]:
            case "wrong":
                raise VLLMValidationError("no such role")
            case "unbalanced":
                of_vllm()
            case "broken":
                raise KeyError("inside")
            case "image":
                return None, ({"type": "multimodal"},)
        return None, ({"type": "token", "prompt_token_ids": [1, 2]},)


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def made(site: Site, script: Script) -> GenerateCalls:
    llm: Any = gated(script, site)
    llm.get_tokenizer = lambda: TOKENIZER
    adapters: Any = site.adapters
    return GenerateCalls(llm, adapters, Renderer(), {"max_tokens": 16, "temperature": 0.5})


async def generate(site: Site, script: Script, job: Job | None = None, **fields: Any) -> GenerateResponse:
    """Do as an Engine with a call of `/generate`."""
    job = job or new_job()
    request = GenerateRequest.model_validate(fields)
    try:
        late = None
        try:
            await site.door.enter(job)
        except RequestError as error:
            if error.status != 408:
                raise
            late = error
        return await made(site, script).run(job, request, late)
    finally:
        if job.slot is not None and not job.placed:
            job.slot.release()


async def refused(site: Site, script: Script, job: Job | None = None, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await generate(site, script, job, **fields)
    return caught.value


def answering() -> Script:
    return Script(output(1, 2, text="ab", finish="stop"))


# Results.


@virtual
async def test_results_are_in_the_order_of_the_prompts_with_their_tokens() -> None:
    async with opened() as site:
        job = new_job()
        response = await generate(site, answering(), job, prompts=["abc", "d"], details=True, task_id="t")
        assert (response.results, response.task_id) == (["ab", "ab"], "t")
        assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (4, 4)
        assert response.usage.total_tokens == 8
        found = [(one.finish_reason, one.prompt_tokens) for one in response.details or [] if one]
        assert found == [("stop", 3), ("stop", 1)]
        site.check_free()


@virtual
async def test_results_keep_their_order_whichever_prompt_ends_first() -> None:
    class Slow(Script):
        async def run(self, prompt: Any, *args: Any, **options: Any) -> Any:
            length = len(prompt["prompt_token_ids"])
            await asyncio.sleep(length)
            self.results = [output(1, text=str(length), finish="stop")]
            async for result in super().run(prompt, *args, **options):
                yield result

    async with opened() as site:
        assert (await generate(site, Slow(), prompts=["abc", "a", "ab"])).results == ["3", "1", "2"]


@virtual
async def test_chats_are_rendered() -> None:
    async with opened() as site:
        script = answering()
        response = await generate(site, script, messages=[chat("hi"), chat("ho")])
        assert response.results == ["ab", "ab"]
        assert [call["prompt"]["prompt_token_ids"] for call in script.calls] == [[1, 2]] * 2
        site.check_free()


@virtual
async def test_fields_of_the_request_go_before_those_of_the_config() -> None:
    async with opened() as site:
        script = answering()
        await generate(site, script, prompts=["a"], max_tokens=3)
        params = script.calls[0]["params"]
        assert (params.max_tokens, params.temperature) == (3, 0.5)


@virtual
async def test_a_default_of_max_tokens_is_reduced_to_what_fits_and_a_stated_one_is_refused() -> None:
    async with opened() as site:
        script = answering()
        prompt = "x" * (CONTEXT - 5)
        await generate(site, script, prompts=[prompt, "a"])
        assert [call["params"].max_tokens for call in script.calls] == [5, 16]
        error = await refused(site, script, prompts=[prompt], max_tokens=6)
        assert error.status == 400
        assert "lower max_tokens to 5" in error.message
        assert len(script.calls) == 2
        site.check_free()


@virtual
async def test_the_adapter_of_a_call_goes_to_the_engine_with_each_prompt() -> None:
    async with opened() as site:
        script = answering()
        await generate(site, script, new_job(adapter=WORDS), prompts=["a", "b"])
        assert [call["lora_request"] for call in script.calls] == [site.adapters.requests[WORDS]] * 2


# Mistakes of the request.


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 1, "min_tokens": 5}, "min_tokens"),
        ({"stop_token_ids": [5, 1_000]}, "stop_token_ids"),
        ({"top_k": -1, "stop": [""]}, "stop"),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
@virtual
async def test_a_wrong_value_is_a_400_of_its_call_that_names_the_field(
    fields: dict[str, Any], param: str, partial: bool
) -> None:
    async with opened() as site:
        script = answering()
        error = await refused(site, script, prompts=["a", "b"], partial=partial, **fields)
        assert (error.status, error.param) == (400, param)
        assert error.message.startswith(param)
        assert "parameter=" not in error.message
        assert script.calls == []
        site.check_free()


@virtual
async def test_the_salt_of_the_cache_goes_to_the_engine_with_each_prompt() -> None:
    async with opened() as site:
        script = answering()
        await generate(site, script, prompts=["a", "b"], cache_salt="mine")
        await generate(site, script, prompts=["a"])
        assert [call["prompt"].get("cache_salt") for call in script.calls] == ["mine", "mine", None]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ("x" * CONTEXT, f"{CONTEXT} tokens; this model's maximum context length"),
        ("x" * 100_000, "100000 characters; this model's maximum context length"),
        # As in data sets that were cut between two halves of a character.
        ("x\ud83d", "surrogates not allowed at character 1"),
    ],
    ids=["empty", "as long as the context", "too long to be tokenized", "no text"],
)
@virtual
async def test_a_prompt_that_can_not_run_fails_its_call_or_is_an_error_beside_the_results(
    prompt: str, message: str
) -> None:
    async with opened() as site:
        script = answering()
        error = await refused(site, script, prompts=[prompt])
        assert (error.status, error.param) == (400, "prompts[0]")
        assert message in error.message
        assert script.calls == []
        response = await generate(site, script, prompts=["a", prompt, "b"], partial=True)
        assert response.results == ["ab", None, "ab"]
        assert [(one.index, message in one.message) for one in response.errors or []] == [(1, True)]
        assert response.usage.prompt_tokens == 2
        # The call is refused for any prompt of it.
        assert (await refused(site, script, prompts=["a", prompt])).param == "prompts[1]"
        site.check_free()


@pytest.mark.parametrize(
    ("text", "message"),
    [("wrong", "no such role"), ("unbalanced", "roles must alternate"), ("image", "only text")],
)
@virtual
async def test_a_chat_that_can_not_be_rendered_is_its_caller_s_fault(text: str, message: str) -> None:
    async with opened() as site:
        response = await generate(site, answering(), messages=[chat("hi"), chat(text)], partial=True)
        assert response.results == ["ab", None]
        assert [(one.index, message in one.message) for one in response.errors or []] == [(1, True)]
        site.check_free()


# Faults of the service.


@virtual
async def test_a_fault_while_a_chat_is_rendered_is_not_that_of_the_chat() -> None:
    async with opened() as site:
        with pytest.raises(KeyError):
            await generate(site, answering(), messages=[chat("hi"), chat("broken")])
        site.check_free()


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (VLLMValidationError("bad value"), 400),
        (EngineDeadError(), 503),
        (EngineGenerateError(), 500),
        (KeyError("inside"), 500),
        (ValueError("ours"), 500),
        (output(finish="error"), 500),
        (None, 500),
    ],
    ids=[
        "the request",
        "the engine",
        "a fault of the engine",
        "a fault",
        "a fault by a value",
        "an error in the engine",
        "no result",
    ],
)
@virtual
async def test_failures_of_vllm_have_a_status(failure: Any, status: int) -> None:
    async with opened() as site:
        error = await refused(site, Script(*[] if failure is None else [failure]), prompts=["abc"])
        assert error.status == status
        assert "inside" not in error.message
        site.check_free()


# Admission.


@virtual
async def test_each_prompt_runs_at_its_exact_cost() -> None:
    async with opened() as site:
        script = HeldScript()
        job = new_job(facts={"prompt": None})
        running = asyncio.ensure_future(generate(site, script, job, prompts=["abc", "x" * 20], max_tokens=8))
        await blocked()
        assert site.batcher.stats.running_cost == BLOCK + 2 * BLOCK
        script.go.set()
        await running
        site.check_free()


@virtual
async def test_a_list_longer_than_the_queue_waits_behind_its_first_prompt() -> None:
    async with opened(max_running=1, max_queue_size=2) as site:
        script = HeldScript()
        running = asyncio.ensure_future(generate(site, script, prompts=["a"] * 50))
        await blocked()
        stats = site.batcher.stats
        assert (stats.running, stats.queue_depth, stats.outside) == (1, 2, WAITING - 2)
        error = await refused(site, script, prompts=["b"] * 20)
        assert (error.status, error.retry_after_s is not None) == (429, True)
        script.go.set()
        assert len((await running).results) == 50
        site.check_free()


@virtual
async def test_calls_with_thousands_of_prompts_have_no_more_tasks_than_the_queue_has_places() -> None:
    """200 calls of 200 tenants with 10,000 prompts each."""
    calls, queue, places = 200, 500, 64
    async with opened(capacity=1_000_000, max_running=places, max_queue_size=queue) as site:
        script = HeldScript()
        prompts = ["a"] * 10_000
        before = len(asyncio.all_tasks())
        tasks = [
            asyncio.ensure_future(generate(site, script, new_job(tenant=f"tenant-{number}"), prompts=prompts))
            for number in range(calls)
        ]
        await blocked()
        stats = site.batcher.stats
        assert (stats.running, stats.queue_depth) == (places, queue)
        assert stats.outside <= WAITING * calls
        assert len(asyncio.all_tasks()) - before <= (1 + WAITING) * calls + queue + places
        # Each call has its first prompt in the engine or in the queue.
        assert all(not task.done() or isinstance(task.exception(), RequestError) for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        site.check_free()


@virtual
async def test_prompts_that_can_not_start_in_time_are_errors_beside_the_results() -> None:
    async with opened(max_running=1) as site:

        class Slow(Script):
            async def run(self, *args: Any, **options: Any) -> Any:
                await asyncio.sleep(2.0)
                async for result in super().run(*args, **options):
                    yield result

        script = Slow(output(1, text="ab", finish="stop"))
        job = new_job(queue_timeout_s=3.0)
        response = await generate(site, script, job, prompts=["a", "b", "c"], partial=True)
        assert response.results == ["ab", "ab", None]
        assert [(one.index, one.type) for one in response.errors or []] == [(2, "timeout_error")]
        assert now() == pytest.approx(4.0, abs=0.01)
        site.check_free()


@virtual
async def test_a_call_that_comes_too_late_fails_or_has_an_error_for_each_prompt() -> None:
    async with opened() as site:
        script = answering()
        for partial in (False, True):
            job = new_job(queue_timeout_s=1.0)
            await asyncio.sleep(2.0)
            if not partial:
                error = await refused(site, script, job, prompts=["a", "b"])
                assert (error.status, error.param) == (408, "prompts[0]")
                continue
            response = await generate(site, script, job, prompts=["a", "b"], partial=True)
            assert response.results == [None, None]
            assert [(one.index, one.type) for one in response.errors or []] == [
                (0, "timeout_error"),
                (1, "timeout_error"),
            ]
        assert script.calls == []
        site.check_free()


@virtual
async def test_a_stop_of_the_batcher_fails_what_waits() -> None:
    async with opened(max_running=1) as site:
        script = HeldScript()
        running = asyncio.ensure_future(generate(site, script, prompts=["a", "b"]))
        await blocked()
        stopping = asyncio.ensure_future(site.batcher.stop(drain=False))
        with pytest.raises(RequestError) as caught:
            await running
        assert (caught.value.status, caught.value.param) == (503, "prompts[1]")
        await stopping


@virtual
async def test_an_adapter_that_was_removed_while_prompts_waited_is_a_404_for_these() -> None:
    async with opened(adapters=PlayedAdapters(1), max_running=1) as site:
        script = HeldScript()
        running = asyncio.ensure_future(generate(site, script, new_job(adapter=WORDS), prompts=["a", "b"]))
        await blocked()
        del site.adapters.requests[WORDS]
        script.go.set()
        with pytest.raises(RequestError) as caught:
            await running
        assert (caught.value.status, len(script.calls)) == (404, 1)
        site.check_free()


@virtual
async def test_prompts_that_wait_for_an_adapter_hold_no_place() -> None:
    async with opened(adapters=PlayedAdapters(1), max_running=4) as site:
        script = HeldScript()
        first = asyncio.ensure_future(generate(site, script, new_job(adapter=WORDS), prompts=["a"]))
        await blocked()
        second = asyncio.ensure_future(generate(site, script, new_job(adapter=SUMS), prompts=["a"] * 5))
        await blocked()
        assert (site.batcher.stats.running, site.batcher.stats.queue_depth) == (1, 5)
        script.go.set()
        await asyncio.gather(first, second)
        site.check_free()


@virtual
async def test_a_long_body_is_out_of_the_way_once_its_first_prompt_is_made() -> None:
    async with opened(capacity=100_000) as site:
        script = HeldScript()
        long = {"size": 1 << 20}
        calls = [
            asyncio.ensure_future(generate(site, script, new_job(facts=long), prompts=["a"]))
            for _ in range(5)
        ]
        await blocked()
        assert len(script.started) == 5
        script.go.set()
        await asyncio.gather(*calls)


@virtual
async def test_a_call_that_is_cancelled_at_any_await_leaves_nothing_held() -> None:
    async with opened(adapters=PlayedAdapters(1), max_running=2, max_queue_size=2) as site:
        for passes in range(60):
            call = asyncio.ensure_future(
                generate(site, answering(), new_job(adapter=WORDS), prompts=["a"] * 6)
            )
            # Each pass of the loop is another await of the call, or of one of its prompts.
            for _ in range(passes):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled() or call.result()
            site.check_free()
    assert call.done()


@virtual
async def test_a_prompt_that_is_refused_at_once_leaves_no_slot_to_one_that_has_not_begun() -> None:
    async with opened() as site:
        job = new_job(queue_timeout_s=1.0)
        await site.door.admit(job)
        await asyncio.sleep(2.0)
        with pytest.raises(RequestError) as caught:
            await made(site, answering()).run(job, GenerateRequest(prompts=["a", "b"]))
        assert (caught.value.status, caught.value.param) == (408, "prompts[1]")
        site.check_free()


@virtual
async def test_a_prompt_that_fails_ends_the_others() -> None:
    async with opened(max_running=4) as site:
        script = HeldScript()
        running = asyncio.ensure_future(generate(site, script, prompts=["a", "b", "", "c"]))
        with pytest.raises(RequestError, match="empty"):
            await running
        assert site.batcher.stats.total_cancelled >= 2
        site.check_free()


class Watched:
    """A tokenizer that notes the slots that run when it is called."""

    def __init__(self, site: Site) -> None:
        self.running: list[int] = []
        self.texts: list[int] = []
        self.max_chars_per_token = TOKENIZER.max_chars_per_token
        self._site = site

    def __call__(self, texts: list[str]) -> Any:
        self.running.append(self._site.batcher.stats.running)
        self.texts.append(len(texts))
        return TOKENIZER(texts)


@virtual
async def test_texts_are_tokenized_in_a_slot_with_those_behind_them_up_to_a_bound() -> None:
    async with opened(max_running=1) as site:
        llm: Any = gated(answering(), site)
        tokenizer = Watched(site)
        llm.get_tokenizer = lambda: tokenizer
        job = new_job()
        await site.door.admit(job)
        adapters: Any = site.adapters
        generate = GenerateCalls(llm, adapters, Renderer(), {"max_tokens": 16})
        await generate.run(job, GenerateRequest(prompts=["d"] * 99))
        assert tokenizer.texts == [33, 33, 33]
        assert set(tokenizer.running) == {1}


async def test_a_long_text_is_tokenized_in_a_thread_in_its_slot() -> None:
    """On a real loop: virtual time knows no threads."""

    async with opened() as site, asyncio.timeout(LIMIT_S):
        script = answering()
        # Longer than the context: it is refused by its tokens, which are counted.
        text = "x" * 2_049
        short = TOKENIZER.max_chars_per_token * CONTEXT < len(text)
        error = await refused(site, script, prompts=[text])
        assert ("characters" if short else "tokens") in error.message
        site.check_free()
