"""CPU of the ledger in an Engine replica.

python -m tests.benchmarks.ledger
"""

import sys
import tempfile
import time
from pathlib import Path

from serve_app.ledger.calls import CallBook
from serve_app.ledger.writer import Ledger
from serve_app.wire.usage import RequestUsage, Tokens
from tests.benchmarks import command
from tests.serve_app.ledger.crashing import request_of

CALLS = 2_000
ROUNDS = 20


class Sequence:
    """Stands for a sequence of vLLM: five attributes are read."""

    __slots__ = ("cached", "counted", "output", "prompt", "stats")

    def __init__(self) -> None:
        self.prompt, self.cached, self.output, self.counted, self.stats = 100, 40, 200, True, True

    def tokens(self) -> Tokens:
        if not self.counted or not self.stats:
            return Tokens()
        return Tokens(self.prompt, self.cached, self.output)

    def ended(self) -> bool:
        return True


def run(book: CallBook, number: int) -> None:
    """Make and end a call."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"%032d" % number)]
    call = book.open(request_of(key="ada", headers=headers), RequestUsage())
    slot = call.usage.begin()
    slot.count(Sequence())
    slot.end()
    call.close()


def main(arguments: list[str] | None = None) -> int:
    """Print microseconds of CPU per call, on the event loop and in the writer's thread."""
    command.parser("tests.benchmarks.ledger", "CPU of the ledger in an Engine replica.").parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        book = CallBook("demo", "Engine:demo#abcdefgh", "Engine-demo-abcdefgh-01234567")
        ledger = Ledger(book, Path(folder))
        loop: list[float] = []
        thread: list[float] = []
        for _ in range(ROUNDS):
            began = time.thread_time()
            for number in range(CALLS):
                run(book, number)
            loop.append((time.thread_time() - began) / CALLS)
            began = time.thread_time()
            ledger.round()
            thread.append((time.thread_time() - began) / CALLS)
        print(f"event loop: {1e6 * min(loop):.2f} to {1e6 * max(loop):.2f} µs per call")
        print(f"writer:     {1e6 * min(thread):.2f} to {1e6 * max(thread):.2f} µs per call")
    return 0


if __name__ == "__main__":
    sys.exit(main())
