"""Time of the look into a body, beside a full parse of it: ``python -m tests.benchmarks.look``.

A body above `LARGE_BYTES` is looked into beside the event loop; the others hold the loop for the time of the
look.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from serve_app.api.errors import RequestError
from serve_app.ingress.body import LARGE_BYTES
from serve_app.settings.ingress import IngressSettings
from tests.benchmarks import command
from tests.serve_app.inspected import inspect

SIZES = {"350 B": 230, "26 KB": 26_000, "520 KB": 520_000, "32 MB": 32 << 20}
WORDS = 'Well, it is so, as it was; the answer was "yes".\n'
UNITS = {
    "text": WORDS,
    "text not in ASCII": "Füße, çà et là, こんにちは",
    "text with escapes": "\U0001f600 and \U0001f680, ",
}
VALUES = {"messages": '{"role":"user","content":"a"}', "empty objects": "{}", "numbers": "1", "NaN": "NaN"}
LIMITS = IngressSettings()


def bodies(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield names, routes and bodies of about so many bytes."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    for name, unit in UNITS.items():
        content = unit * (size // len(json.dumps(unit)))
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 9}
        yield name, chat, json.dumps(body, ensure_ascii="escapes" in name).encode()
    for name, unit in VALUES.items():
        values = ",".join([unit] * (size // (len(unit) + 1)))
        path, field = (completions, "prompt") if name == "numbers" else (chat, "messages")
        yield name, path, f'{{"{field}":[{values}]}}'.encode()


def least_ms(call: Callable[[], object]) -> float:
    """Return the least of several times of a call, in milliseconds."""
    found, times = [], 1
    for _ in range(5):
        began = time.thread_time()
        for _ in range(times):
            with suppress(RequestError):
                call()
        took = time.thread_time() - began
        found.append(took / times)
        times = max(1, int(0.02 * times / took))
    return 1_000 * min(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return the exit status."""
    command.parser("tests.benchmarks.look", (__doc__ or "").partition("\n\n")[2]).parse_args(arguments)
    print(f"{'body':18} {'size':>6} {'look ms':>9} {'parse ms':>9}  on the loop")
    for size, count in SIZES.items():
        for name, path, body in bodies(count):
            look = least_ms(lambda body=body, path=path: inspect(body, path, LIMITS))  # type: ignore[misc]
            parse = least_ms(lambda body=body: json.loads(body))  # type: ignore[misc]
            where = "yes" if len(body) <= LARGE_BYTES else "no"
            print(f"{name:18} {size:>6} {look:9.4f} {parse:9.4f}  {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
