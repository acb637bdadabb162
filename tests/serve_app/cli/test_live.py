"""The live picture: it lasts while the service is away, and ends at Ctrl-C."""

import io
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from serve_app.cli.top import watch
from serve_app.client import Client, ServiceError
from tests.serve_app.cli.fake_service import FakeService, llm

OFF = "\x1b[?1049l"
"""What gives the terminal back."""


class Terminal:
    """A terminal, and the time that passes in front of it.

    Attributes:
        now: The time in seconds.
        frames: The pictures that were shown.
    """

    def __init__(self, *steps: Callable[[], None]) -> None:
        self.now = 0.0
        self.frames: list[str] = []
        self._steps = iter(steps)
        self._file = io.StringIO()
        self.console = Console(file=self._file, force_terminal=True, width=120, height=40, color_system=None)

    def sleep(self, seconds: float) -> None:
        """Take the picture, let the time pass and do the next step; after the last comes Ctrl-C."""
        self.frames.append(self._file.getvalue())
        self._file.seek(0)
        self._file.truncate()
        self.now += seconds
        step = next(self._steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    def watch(self, service: FakeService, interval_s: float = 2.0) -> str:
        """Watch to the end; return what was written then."""
        with Client(service.url) as client:
            watch(client, interval_s, self.console, self.sleep, lambda: self.now)
        return self._file.getvalue()


@pytest.fixture
def service() -> Iterator[FakeService]:
    asked = 0

    def answer(path: str, headers: dict[str, str]) -> tuple[int, object]:
        nonlocal asked
        if path != "/stats":
            return 404, ""
        asked += 1
        return 200, {"models": {"demo": {"replicas": [llm("a", out=10 * asked, running=asked)]}}}

    service = FakeService(answer)
    yield service
    service.stop()


def nothing() -> None:
    """Let the time pass."""


def test_pictures_follow_the_service_until_ctrl_c(service: FakeService) -> None:
    terminal = Terminal(nothing, nothing)
    end = terminal.watch(service)
    first, second, third = terminal.frames
    assert "1/64" in first
    assert "2/64" in second
    # Tokens per second, as the service says.
    assert " 20 " in second
    assert "3/64" in third
    assert OFF in end


def test_the_last_picture_stays_while_the_service_is_away(service: FakeService) -> None:
    terminal = Terminal(nothing, service.stop, nothing, service.start, nothing)
    terminal.watch(service)
    _, before, lost, longer, back, after = terminal.frames
    assert "lost" not in before
    assert "unreachable for 0 s, the figures are old" in lost
    assert "no service is there" in lost
    assert "2/64" in lost
    assert "unreachable for 2 s" in longer
    assert "2/64" in longer
    assert "lost" not in back
    assert "3/64" in back
    assert "4/64" in after


@pytest.mark.parametrize("status", [401, 429, 503])
def test_a_service_that_refuses_later_is_told(service: FakeService, status: int) -> None:
    def refuse() -> None:
        service.answer = lambda path, headers: (status, {"error": {"message": "not\x07now"}})

    terminal = Terminal(refuse)
    terminal.watch(service)
    assert f"the service answers {status} (not now)" in " ".join(terminal.frames[-1].split())
    assert "\x07" not in terminal.frames[-1]


def test_a_first_look_that_fails_is_an_error(service: FakeService) -> None:
    service.stop()
    with pytest.raises(ServiceError):
        Terminal().watch(service)
    service.start()


def test_an_error_gives_the_terminal_back(service: FakeService) -> None:
    def fail() -> None:
        raise RuntimeError

    terminal = Terminal(fail)
    with pytest.raises(RuntimeError):
        terminal.watch(service)
    assert isinstance(terminal.console.file, io.StringIO)
    assert OFF in terminal.console.file.getvalue()
