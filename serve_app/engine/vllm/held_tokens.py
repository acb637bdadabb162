"""Fewer messages from the engine to the replica."""

import time
from typing import Any

LONGEST_S = 0.1
"""Longest wait of a streamed token for later tokens, in seconds, with any number of streams."""

PIECES_PER_S = 1_000.0
"""Pieces per second that a replica sends of all its streams together, but for `LONGEST_S`.

A piece costs the same whether it has one token or eight: its JSON, its message between two processes, its
write to a socket. So the pieces of many streams have more tokens.
"""

STATS_S = 0.01
"""Seconds between two messages that hold statistics alone, at least. A longer step has its own message."""


WHOLE_S = 0.25
"""Seconds for which the tokens of a whole answer are held: only the ledger would see them earlier."""


class HeldTokens:
    """A scheduler of vLLM that sends fewer messages to the replica.

    vLLM sends a message after each step, with the tokens of all requests, for which the replica wakes. Here
    the first token of a request goes at once; later tokens are held for `WHOLE_S`, later tokens of a stream
    for the time between two of its pieces, or until the request ends. A step that tells of no request has no
    message but for the statistics, which come every `STATS_S`, and at once where nothing runs any more.

    Requests for which `may_be_held` is false are left as they are. So are all requests of an engine that
    reports more about each token: vLLM would look for the reports of held tokens in the last step.
    """

    running: list[Any]
    scheduler_config: Any
    observability_config: Any
    return_sampling_mask = False
    aux_output_connector: Any = None
    _steps = 0
    _stats_due = 0.0
    _piece_s = 0.0

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], *args: Any, **options: Any
    ) -> tuple[list[int], bool]:
        scheduler: Any = super()
        token_ids, stopped = scheduler._update_request_with_output(request, new_token_ids, *args, **options)
        now = time.monotonic()
        if "held" not in vars(request):
            # vLLM's requests have no such attribute.
            request.held = _Held(_is_stream(request), now) if self._may_be_held(request) else None
        elif (held := request.held) is not None:
            longest_s = self._piece_s if held.of_stream else WHOLE_S
            if not stopped and now < held.told_at + longest_s:
                # vLLM makes no output for a request without tokens.
                held.token_ids += token_ids
                return [], False
            token_ids = held.token_ids + token_ids
            request.held = _Held(held.of_stream, now)
        return token_ids, stopped

    def make_stats(self, *args: Any, **options: Any) -> Any:
        """Return vLLM's statistics; None: they are not due.

        Their `step_counter`, which vLLM leaves at 0, is the number of steps since the last statistics.
        """
        self._steps += 1
        now = time.monotonic()
        logged = self.observability_config.enable_logging_iteration_details
        of_this_step = logged or any(args) or any(options.values())
        if self.running and now < self._stats_due and not of_this_step:
            return None
        scheduler: Any = super()
        stats = scheduler.make_stats(*args, **options)
        if stats is not None:
            stats.step_counter = self._steps
        self._steps, self._stats_due = 0, now + STATS_S
        self._piece_s = min(sum(map(_is_stream, self.running)) / PIECES_PER_S, LONGEST_S)
        return stats

    def _may_be_held(self, request: Any) -> bool:
        # An interval of the engine's options counts the tokens of a stream.
        counted = _is_stream(request) and self.scheduler_config.stream_interval > 1
        more = self.return_sampling_mask or self.aux_output_connector is not None
        left_alone = request.resumable or counted or more
        return may_be_held(request.sampling_params) and not left_alone


class _Held:
    """Tokens of a request that were not sent to the replica yet, and the time of the last message."""

    __slots__ = ("of_stream", "token_ids", "told_at")

    def __init__(self, of_stream: bool, told_at: float) -> None:
        self.of_stream = of_stream
        self.token_ids: list[int] = []
        self.told_at = told_at


def _is_stream(request: Any) -> bool:
    params = request.sampling_params
    return params is not None and params.output_kind.name == "DELTA"


def may_be_held(params: Any) -> bool:
    """Return whether nothing but the tokens of a request is told, which need not be seen one by one.

    The replica looks for stop strings in each token, and vLLM gives logprobs, and goes on in a grammar, token
    by token. A stream whose client asks for an interval of its own is sent so.

    Args:
        params: Its `SamplingParams`; None: it has no tokens.
    """
    return (
        params is not None
        and params.output_kind.name != "CUMULATIVE"
        and not params.stop
        and params.num_logprobs is None
        and params.structured_outputs is None
        and params.stream_interval is None
    )
