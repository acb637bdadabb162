"""An executor for vLLM on a simulated device.

The imports are valid for vLLM 0.32.

    vllm serve MODEL --distributed-executor-backend serve_app.simulation.vllm_executor.SimulatedExecutor
        --additional-config '{"simulate": "h100-8b"}' --block-size 16
"""

import math
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

from serve_app.simulation.device import Device
from serve_app.simulation.profiles import OWN, Profile, Work, read_profile
from serve_app.simulation.sequence import TokenSequence

logger = init_logger(f"vllm.{__name__}")

LETTERS = 26
"""Tokens that answers consist of, each with the text of one letter."""

ANSWERS = {
    "get_supported_tasks": ("generate",),
    "add_lora": True,
    "remove_lora": True,
    "pin_lora": True,
    "list_loras": set[int](),
}
"""Answers of the device to vLLM's calls of a worker, by method; it answers None to all others."""


WRITES = ("add_lora", "remove_lora", "pin_lora")
"""Calls that write to the memory of the device."""


class _Running(NamedTuple):
    """A request on the device."""

    tokens: TokenSequence
    params: SamplingParams | None


class _Batch(NamedTuple):
    """A submitted step: its requests, the requests that get a token, and its end on the device's clock."""

    requests: list[str]
    sampled: list[str]
    ends_at: float


class _Output(Future[ModelRunnerOutput]):
    """The output of a step; `result` waits for its end."""

    def __init__(self, device: Device, ends_at: float, output: ModelRunnerOutput) -> None:
        super().__init__()
        self._device = device
        self._ends_at = ends_at
        self.set_result(output)

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._device.wait(self._ends_at)
        return super().result()


class SimulatedExecutor(Executor):  # type: ignore[misc]
    """An executor whose steps take the time of a profile and no CPU.

    Answers consist of letters: each token is a function of the tokens before it. They don't end by
    themselves, but at `max_tokens`, a stop string, the end of a grammar, or the end of the context.

    vLLM's `additional_config` has the profile under "simulate": its name, its path or its fields.

    Attributes:
        make_device: Makes the device of a profile.
    """

    make_device: Callable[[Profile], Device] = staticmethod(Device)

    def _init_executor(self) -> None:
        given = self.vllm_config.additional_config
        profile = read_profile(given.get(OWN)) if isinstance(given, dict) else None
        if profile is None:
            raise ValueError('additional_config: {"simulate": PROFILE} is required by the simulated device')
        profile = Profile.model_validate(profile)
        logger.warning("The device is simulated (%s): no model runs, and answers have no sense", profile.name)
        # vLLM turns it off for CPUs; the engine asks for it after this.
        self.scheduler_config.async_scheduling = profile.async_scheduling
        self._device = self.make_device(profile)
        tokenizer = cached_tokenizer_from_config(self.model_config)
        self._letters = _letters(tokenizer)
        self._end = tokenizer.eos_token_id
        self._requests: dict[str, _Running] = {}
        self._batch: _Batch | None = None
        self._device.load()

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [{"simulated": self._cache()}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["NHD", "HND"]]

    def determine_available_memory(self) -> list[int]:
        cache = self._cache()
        # vLLM keeps one block for itself.
        blocks = math.ceil(self._device.profile.kv_tokens / cache.block_size) + 1
        return [blocks * cache.page_size_bytes]

    def compile_or_warm_up_model(self) -> None:
        """Do nothing: `load_s` stands for it."""

    def check_health(self) -> None:
        """Do nothing: the device is always healthy."""

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        if method in WRITES and self.is_sleeping:
            # A GPU ends the process: the memory that the adapter is written to is not mapped.
            raise RuntimeError(f"{method}: the device's memory is not there while the model sleeps")
        match method:
            case "sleep":
                self._device.fall_asleep()
            case "wake_up" if "weights" in ((kwargs or {}).get("tags") or ["weights"]):
                self._device.wake_up()
            case "reload_weights":
                self._device.load()
        answer = [ANSWERS.get(method) if isinstance(method, str) else None]
        if not non_block:
            return answer
        done: Future[list[Any]] = Future()
        done.set_result(answer)
        return done

    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = False) -> Any:
        """Submit a step; `sample_tokens` returns its output."""
        self._update(scheduled)
        if not scheduled.num_scheduled_tokens:
            # vLLM samples after steps with work only.
            output: ModelRunnerOutput | None = EMPTY_MODEL_RUNNER_OUTPUT
        else:
            self._batch = self._submit(scheduled)
            output = None
        if not non_block:
            return output
        done: Future[ModelRunnerOutput | None] = Future()
        done.set_result(output)
        return done

    def sample_tokens(self, grammar: GrammarOutput | None, non_block: bool = False) -> Any:
        """Return the output of the step that was submitted last, or its future."""
        assert self._batch is not None
        batch, self._batch = self._batch, None
        output = _Output(self._device, batch.ends_at, self._sample(batch, grammar))
        return output if non_block else output.result()

    def _update(self, scheduled: SchedulerOutput) -> None:
        """Take over new, continued and finished requests from the scheduler."""
        for request in scheduled.finished_req_ids:
            self._requests.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            prompt = new.prompt_token_ids or [0] * new.prompt_len
            # A request that was preempted comes again, with the tokens that it has got so far.
            outputs = (new.prefill_token_ids or [])[len(prompt) :]
            self._requests[new.req_id] = _Running(TokenSequence(prompt, outputs), new.sampling_params)
        cached = scheduled.scheduled_cached_reqs
        for request, count in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            # A preempted request may have lost the token that was on its way.
            self._requests[request].tokens.keep(count)

    def _submit(self, scheduled: SchedulerOutput) -> _Batch:
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        prefill = context = 0
        sampled = []
        for request, count in scheduled.num_scheduled_tokens.items():
            known = len(self._requests[request].tokens)
            end = computed[request] + count
            context += end
            # A draft takes the time of a prompt's token.
            prefill += count if known - computed[request] > 1 else count - 1
            if end >= known:
                sampled.append(request)
        work = Work(prefill, len(scheduled.num_scheduled_tokens), context)
        return _Batch(list(scheduled.num_scheduled_tokens), sampled, self._device.submit(work))

    def _sample(self, batch: _Batch, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        allowed = {} if grammar is None else self._allowed(grammar)
        tokens = {
            request: self._requests[request].tokens.next(allowed.get(request, self._letters))
            for request in batch.sampled
        }
        return ModelRunnerOutput(
            req_ids=batch.requests,
            req_id_to_index={request: index for index, request in enumerate(batch.requests)},
            sampled_token_ids=[[tokens[each]] if each in tokens else [] for each in batch.requests],
            logprobs=self._logprobs(batch.requests, tokens),
        )

    def _allowed(self, grammar: GrammarOutput) -> dict[str, list[int]]:
        """Return the tokens that a request's grammar allows next; where the end is allowed, the end alone."""
        found = {}
        for request, mask in zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True):
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            ids = np.flatnonzero(bits[: self.model_config.get_vocab_size()]).tolist()
            found[request] = [self._end] if self._end in ids else ids
        return found

    def _logprobs(self, requests: list[str], tokens: dict[str, int]) -> LogprobsLists | None:
        """Return the probabilities that some request asks for: all letters are equally likely."""
        asked = [params for each in tokens if (params := self._requests[each].params)]
        most = max((-1 if each.num_logprobs is None else each.num_logprobs for each in asked), default=-1)
        if most < 0:
            return None
        likely = list(islice(self._letters, most))
        # The token that was sampled comes first, then the likeliest ones.
        ids = np.array([[tokens.get(each, self._letters[0]), *likely] for each in requests])
        return LogprobsLists(
            ids,
            np.full(ids.shape, -math.log(len(self._letters)), dtype=np.float32),
            np.ones(len(requests), dtype=np.int64),
        )

    def _cache(self) -> FullAttentionSpec:
        """Return a KV cache of the smallest size per token; nothing of it is allocated."""
        return FullAttentionSpec(
            block_size=self.cache_config.block_size, num_kv_heads=1, head_size=1, dtype=torch.float16
        )


def _letters(tokenizer: Any) -> list[int]:
    """Return the tokens whose text is a single lower-case letter."""
    special = set(tokenizer.all_special_ids)
    ids = (each for each in sorted(tokenizer.get_vocab().values()) if each not in special)
    found = list(islice((each for each in ids if _is_letter(tokenizer.decode([each]))), LETTERS))
    if not found:
        raise ValueError("the tokenizer has no token for a single letter")
    return found


def _is_letter(text: str) -> bool:
    return len(text) == 1 and "a" <= text <= "z"
