"""Counting of an engine's work for each call, from the statistics that vLLM's own counters are made of.

The imports are those of vLLM 0.32.
"""

from contextvars import ContextVar
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from serve_app.ledger.calls import CallBook, Part
from serve_app.ledger.rows import Tokens

_part: ContextVar[Part | None] = ContextVar("part", default=None)


class _NotCounted(int):
    """A zero, which is told from the one of a prompt that was counted."""


NOT_COUNTED = _NotCounted()


def set_part(part: Part) -> None:
    """Set the part whose sequences the running task begins, and those tasks that it starts."""
    _part.set(part)


class VLLMSequence:
    """One sequence of vLLM; its counts are those of vLLM's output processor.

    vLLM adds the tokens of a step to its counters and to the sequence's own statistics in one place. It adds
    a prompt with the first output of a sequence, and notes then how much of it was in the cache. One that is
    aborted before leaves its prompt uncounted in both. Work that is done again after a preemption isn't
    counted again.

    Args:
        state: vLLM's state of the sequence, as it begins.
        states: All sequences that vLLM has.
    """

    __slots__ = ("_state", "_states")

    def __init__(self, state: Any, states: dict[str, Any]) -> None:
        self._state = state
        self._states = states
        # vLLM sets it together with the count of the prompt, and to a plain number.
        state.num_cache_creation_tokens = NOT_COUNTED
        # Cached tokens that the request itself states, for which vLLM would give up its own count.
        state.remote_prefill_cached_tokens = None

    def tokens(self) -> Tokens:
        """Return what vLLM has counted so far."""
        state = self._state
        if state.num_cache_creation_tokens is NOT_COUNTED:
            prompt = cached = 0
        else:
            prompt, cached = state.prompt_len, state.num_cached_tokens
        if state.stats is not None:
            return Tokens(prompt, cached, state.stats.num_generation_tokens)
        # Without statistics (`disable_log_stats`) vLLM's counters stand still.
        return Tokens(prompt, cached, state.detokenizer.num_output_tokens() if state.detokenizer else 0)

    def ended(self) -> bool:
        """Return whether vLLM has forgotten the sequence."""
        return self._states.get(self._state.request_id) is not self._state


def count_sequences(llm: AsyncLLM, book: CallBook) -> None:
    """Give each sequence of an engine to the part of a call that begins it.

    Args:
        llm: The engine.
        book: The calls.
    """
    processor = llm.output_processor
    add = processor.add_request

    def add_request(request: Any, *args: Any, **options: Any) -> None:
        states = processor.request_states
        known = request.request_id in states
        add(request, *args, **options)
        if not known:
            (_part.get() or book.stray()).begin(VLLMSequence(states[request.request_id], states))

    processor.add_request = add_request


class EngineCounters(StatLoggerBase):  # type: ignore[misc]
    """vLLM's own counters of tokens since the start, to compare the ledger with.

    Attributes:
        prompt: Tokens of prompts.
        output: Tokens that were sampled.
    """

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.prompt = 0
        self.output = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Add a step."""
        if iteration_stats is not None:
            self.prompt += iteration_stats.num_prompt_tokens
            self.output += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM calls it."""
