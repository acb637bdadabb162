"""Reports on the usage ledger, made by the command `saturate usage` in a process of its own.

Such a report may read gigabytes: in this process it would hold up streams.
"""

import asyncio
import re
import sys
from collections.abc import Mapping
from contextlib import suppress

from serve_app.api.errors import ErrorType, RequestError
from serve_app.system.cpu_scheduling import use_usual_priority

COMMAND = (sys.executable, "-m", "serve_app.cli", "usage")

FIELDS = ("by", "since", "until", "format")
"""Parameters of a report, which are options of the command."""

OPTION = re.compile(rf"--({'|'.join(FIELDS)})\b")

TYPES = {"json": "application/json", "csv": "text/csv; charset=utf-8"}

WAIT_S = 60.0
"""Seconds that a report may take, with those behind which it waits."""

USAGE_ERROR = 2
"""Exit status of a command with a wrong option."""


class UsageReports:
    """Reports on a ledger, one at a time.

    Args:
        folder: Folder or URL of the ledger; None: the service keeps none.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._one = asyncio.Lock()

    async def make(self, fields: Mapping[str, str]) -> tuple[bytes, str]:
        """Return a report and its media type.

        Args:
            fields: Parameters, as the client wrote them.

        Raises:
            RequestError: 404, there is no ledger; 400, a parameter is wrong; 503, the ledger can't be read.
        """
        if self._folder is None:
            message = "This service keeps no usage ledger: its config has no `args.usage.ledger`"
            raise RequestError(404, "not_found_error", message)
        for name, value in fields.items():
            if name not in FIELDS:
                message = f"{name}: unknown parameter; known are {', '.join(FIELDS)}"
                raise RequestError(400, "invalid_request_error", message, param=name)
            if "\0" in value:
                # No argument of a command may have one.
                message = f"{name}: must not have a NUL"
                raise RequestError(400, "invalid_request_error", message, param=name)
        form = fields.get("format", "json")
        if form not in TYPES:
            message = f"format: {form!r} is no format of a report; take {' or '.join(TYPES)}"
            raise RequestError(400, "invalid_request_error", message, param="format")
        # One argument for an option and its value: no value is taken for an option.
        options = [f"--{name}={value}" for name, value in (dict(fields) | {"format": form}).items()]
        try:
            async with asyncio.timeout(WAIT_S), self._one:
                text = await _run([*options, "--", self._folder])
        except TimeoutError:
            message = f"The report took over {WAIT_S:g} s; ask for a shorter time, or run `saturate usage`"
            raise RequestError(503, "service_unavailable", message, retry_after_s=WAIT_S) from None
        return text, TYPES[form]


async def _run(arguments: list[str]) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    use_usual_priority(process.pid)
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode == 0:
        return output
    lines = errors.decode(errors="replace").strip().splitlines() or ["saturate usage failed"]
    # Of "error: --by: 'x' is no column (see `... --help`)" the middle is for clients.
    message = OPTION.sub(r"\1", lines[-1].removeprefix("error: ").partition(" (see `")[0])
    # A folder that is missing is no option, and no mistake of the client.
    wrong = process.returncode == USAGE_ERROR and OPTION.search(lines[-1]) is not None
    type: ErrorType = "invalid_request_error" if wrong else "service_unavailable"
    raise RequestError(400 if wrong else 503, type, message)
