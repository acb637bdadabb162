"""What both batchers have in common from outside: they start, run and stop."""

import asyncio
from typing import Any, Self

from batcher.admission import Intake, State
from batcher.observations import Observations
from batcher.stats import Recorder


class Lifecycle:
    """The outside of a batcher's life; `async with` starts and stops it."""

    _intake: Intake[Any]
    _recorder: Recorder

    @property
    def is_running(self) -> bool:
        """Whether records are let in."""
        return self._intake.state is State.RUNNING

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which it was started.

        Raises:
            RuntimeError: It has not been started.
        """
        return self._intake.loop

    def observe(self, limit: int = 65_536) -> Observations:
        """Keep from now on what each record took, and return where it is kept.

        Args:
            limit: Records that are kept until they are taken; beyond it the oldest give way.
        """
        self._recorder.observations = Observations(limit)
        return self._recorder.observations

    async def start(self) -> None:
        """Let records in.

        Raises:
            RuntimeError: It runs already, or is still stopping.
        """
        self._intake.open()

    async def stop(self, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Refuse new records, see the others off, then stop. May be called twice, and again later.

        Args:
            drain: Let what waits run first; False: it fails with `Closed`. What runs may finish.
            timeout: Seconds after which what still waits fails with `Closed`, and the functions that the
                batcher runs are cancelled. A thread can't be: its result is dropped. Slots that callers
                hold by then are no longer waited for.
        """
        await self._intake.close(drain, timeout)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()
