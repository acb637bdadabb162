"""Tokenizing of texts: in the order of a batcher, and with a thread of its own for long requests."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from batcher import BatcherError, ContinuousBatcher
from serve_app.engine.admission import AdmissionRequest, current, refusal_of

LONG_BYTES = 65_536
"""A request with a larger body is long."""

SHORT_BYTES = 2_048
"""A request with a body up to this size is short: its text is tokenized in half a millisecond.

A thread takes nearly as long to begin, and 5 ms longer where the event loop has the interpreter's lock.
"""

LONG_QUEUE_CHARS = 1 << 28
"""Characters of long requests that may wait."""

OTHERS_AT_ONCE, LONG_AT_ONCE = 16, 2
"""Texts that are handed to their threads at once: these don't run out of work between two texts."""

T = TypeVar("T")


def is_short(request: AdmissionRequest, characters: int = 0) -> bool:
    """Return whether a text of a request is worked on at once, on the event loop.

    Args:
        request: The request. One whose body has no size, such as a call of the handle, is not short.
        characters: Length of the text, which may be longer than the body: a chat template adds to it.
    """
    return 0 < request.size <= SHORT_BYTES and characters <= SHORT_BYTES


@dataclass(frozen=True, slots=True)
class _Queue:
    """Threads, and the batcher that admits texts to them; a text costs its characters."""

    batcher: ContinuousBatcher
    threads: ThreadPoolExecutor


class TokenizingQueue:
    """Threads that tokenize, in the order of tiers and tenants; a short text is tokenized without one.

    The texts of a long request take turns with those of other long ones, in one thread. The others never wait
    behind them: a tokenizer leaves the interpreter's lock alone while it works. A request that isn't long
    waits behind the texts that its thread has, `OTHERS_AT_ONCE` of `LONG_BYTES` at most, and has its tenant's
    share of the thread after them.

    Args:
        max_queue_size: Texts that may wait, of long requests and of others; then the first text of a request
            is refused.
        threads: Threads for requests that are not long.
        tenant_weights: Share of a tenant in relation to the others.
    """

    def __init__(
        self, max_queue_size: int, threads: int = 1, tenant_weights: Mapping[str, float] | None = None
    ) -> None:
        def queue(threads: int, running: int) -> _Queue:
            batcher = ContinuousBatcher(
                capacity=LONG_QUEUE_CHARS,
                max_running=running,
                max_queue_size=max_queue_size,
                max_queue_cost=LONG_QUEUE_CHARS,
                oversize="alone",
                tenant_weights=tenant_weights,
            )
            return _Queue(batcher, ThreadPoolExecutor(threads, thread_name_prefix="tokenize"))

        self._others = queue(threads, OTHERS_AT_ONCE)
        self._long = queue(1, LONG_AT_ONCE)

    async def start(self) -> None:
        """Admit texts."""
        for queue in (self._others, self._long):
            await queue.batcher.start()

    async def stop(self, timeout_s: float = 1.0) -> None:
        """Refuse texts, those that wait too.

        Args:
            timeout_s: Seconds for those that a thread has begun.
        """
        for queue in (self._others, self._long):
            await queue.batcher.stop(drain=False, timeout=timeout_s)
            queue.threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, call: Callable[[], T], characters: int) -> T:
        """Return the result of a call that tokenizes, made when its turn has come.

        It is made in a thread, unless the request is short.

        Args:
            call: Tokenizes one text of the task's request, or several.
            characters: Their length.

        Raises:
            RequestError: 429, too many texts wait; 408, the request's time is over; 503, the replica stops.
        """
        request, result = current()
        queue = self._long if max(request.size, characters) > LONG_BYTES else self._others
        scheduling = request.scheduling
        share = request.share
        queue.batcher.weigh(share, scheduling.weight)
        # As with slots: what has begun is not refused halfway.
        begun = result.texts > 0
        result.texts += 1
        make_slot = queue.batcher.slot if request.wait or begun else queue.batcher.slot_nowait
        try:
            slot = make_slot(
                characters,
                priority=scheduling.priority,
                tenant=share,
                deadline=None if begun else request.deadline,
            )
            await slot.__aenter__()
        except BatcherError as error:
            result.refusal = refusal_of(error)
            raise result.refusal from None
        if not begun and is_short(request, characters):
            try:
                return call()
            finally:
                slot.release()
        future = asyncio.get_running_loop().run_in_executor(queue.threads, call)

        def ended(done: "asyncio.Future[T]") -> None:
            slot.release()
            if not done.cancelled():
                # Its client may have left: then nobody else takes the error.
                done.exception()

        # A thread can't be stopped. Its place is taken until it ends, so that calls whose clients have left
        # don't pile up in front of it.
        future.add_done_callback(ended)
        return await asyncio.shield(future)
