"""A process that answers JSON lines on standard input, for measurements without HTTP."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from types import TracebackType

from serve_app.api.protocol import JSON


class Pipe:
    """The client side.

    Args:
        command: The program and its arguments.
        env: Its environment.
        log: File to which its other output is appended.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("a") as output:
            self.process = Popen(
                command, stdin=PIPE, stdout=PIPE, stderr=output, env=env, text=True, start_new_session=True
            )

    def ask(self, question: JSON) -> JSON:
        """Send a question and return its answer.

        Raises:
            RuntimeError: The process ended.
        """
        assert self.process.stdin
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> JSON:
        """Return the next answer.

        Raises:
            RuntimeError: The process ended.
        """
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended:\n{self._log.read_text()[-3000:]}")
        answer: JSON = json.loads(line)
        return answer

    def close(self) -> None:
        """Close the process's standard input, at which it ends."""
        assert self.process.stdin
        self.process.stdin.close()

    def __enter__(self) -> "Pipe":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self.process.wait(timeout=120)


def serve(prepare: Callable[[], Callable[[JSON], JSON]]) -> None:
    """Answer questions until standard input ends: the server side.

    Args:
        prepare: Makes everything ready and returns the function that answers. An empty answer is sent
            once it has returned.
    """
    # Libraries print to standard output; their output must not mix with answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        answer = prepare()
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
