"""The steps of a vLLM engine, for the goals of its batcher.

The imports are those of vLLM 0.32.
"""

import asyncio
import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from batcher import ContinuousBatcher


class StepTimer(StatLoggerBase):  # type: ignore[misc]
    """Measures the engine's steps for the batcher; vLLM calls it as one of its loggers.

    Attributes:
        batcher: Gets the steps; None: they are dropped.
    """

    batcher: ContinuousBatcher | None = None

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self._last = 0.0
        self._busy = False

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is None or self.batcher is None:
            return
        now = time.monotonic()
        if self._busy:
            # Statistics may be of several short steps, see `HeldTokens`.
            step_s = (now - self._last) / (scheduler_stats.step_counter or 1)
            # Later: an error in a logger would end vLLM's client for good.
            asyncio.get_running_loop().call_soon(self.batcher.step, step_s)
        self._last = now
        self._busy = scheduler_stats.num_running_reqs > 0

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM calls it."""
