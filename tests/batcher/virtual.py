"""An event loop on virtual time: sleeping costs nothing, and waiting for nothing is an error."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")

BLINK_S = 1e-6


class _Selector(selectors.SelectSelector):
    """Instead of waiting for the next timer, move the clock to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits and nothing is going to happen")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock moves only when all its tasks are blocked, and then to the next timer at once."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test on virtual time."""

    @functools.wraps(test)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return wrapper


def now() -> float:
    """Return the time of the running loop: the clock to give to what is tested."""
    return asyncio.get_running_loop().time()


async def blocked() -> None:
    """Return when every other task is blocked; on virtual time no timer fires before that."""
    await asyncio.sleep(BLINK_S)


async def until(condition: Callable[[], bool]) -> None:
    """Return in the pass of the loop in which the condition has come true."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition did not come true")
