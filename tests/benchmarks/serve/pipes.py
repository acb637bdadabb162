"""A process that answers questions, one JSON text a line: for what is measured without HTTP."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from types import TracebackType
from typing import Any

JSON = dict[str, Any]


class Pipe:
    """The asking end.

    Args:
        command: The program and its arguments.
        env: Its environment.
        log: Where what it says besides is added.
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
            raise RuntimeError(f"it ended by itself:\n{self._log.read_text()[-3000:]}")
        answer: JSON = json.loads(line)
        return answer

    def close(self) -> None:
        """Let the process end: it has no more questions to wait for."""
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
    """Be the answering end, until there are no more questions.

    Args:
        prepare: Gets everything ready and returns the function that answers. Only what it has
            returned counts as ready; an empty answer says so.
    """
    # Libraries print; what they print must not be taken for an answer.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        answer = prepare()
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
