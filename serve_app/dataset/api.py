"""A file of requests through a service's batch API: upload, wait, download."""

import hashlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
from pydantic_core import from_json, to_json

from serve_app.api.protocol import JSON
from serve_app.client import Backoff, Client, Retries, ServiceError, json_of
from serve_app.dataset.errors import CommandError, gave_up, output_error, written
from serve_app.dataset.progress import Shown, eta, open_progress
from serve_app.jobs.models import ENDED
from serve_app.rows.errors import GaveUpError, RunError
from serve_app.system.disk import drafted

FIRST_POLL_S, MOST_POLL_S = 0.25, 5.0
"""Seconds between two looks at a batch: at first, and at most."""

RUN = "saturate_run"
"""Key of the batch's metadata by which a run finds its batch. The run finds its file by the name."""

SKEW_S = 86_400
"""Seconds by which the clocks of this machine and of the service may differ."""

PIECE_BYTES = 1 << 20

FIELDS = ("id", "status", "request_counts", "output_file_id", "error_file_id", "errors")
"""Fields of a batch that a run needs."""

Sleep = Callable[[float], None]


class APIRun:
    """One file through the batch API of a service.

    The batch runs in the service, independent of this process. A note beside the output has the id of the
    batch, so that the same command continues the batch.

    Args:
        input: The file of requests.
        output: Path of the results; None: beside the input.
        url: Address of the service.
        api_key: Sent as a bearer token.
        window: The batch's `completion_window`.
        retries: Further tries of a call that fails.
        timeouts: Seconds to connect, read, write, and to get a connection.
        overwrite: Forget an earlier run with this output.
        quiet: Show no progress.
        transport: Another transport, for tests.
        sleep: Waits some seconds.
        backoff: Waits between two tries.

    Attributes:
        output: Path of the results.
        errors: Path of the failed rows.
    """

    def __init__(
        self,
        input: Path,
        output: Path | None,
        *,
        url: str,
        api_key: str | None = None,
        window: str = "24h",
        retries: int = 20,
        timeouts: httpx.Timeout | None = None,
        overwrite: bool = False,
        quiet: bool = False,
        transport: httpx.BaseTransport | None = None,
        sleep: Sleep = time.sleep,
        backoff: Backoff | None = None,
    ) -> None:
        self.output = output or input.with_name(f"{input.stem}.output.jsonl")
        self.errors = self.output.with_name(
            f"{self.output.name.removesuffix('.jsonl').removesuffix('.output')}.errors.jsonl"
        )
        self._input = input
        self._window = window
        self._retries = retries
        self._overwrite = overwrite
        self._note_path = self.output.with_name(f"{self.output.name}.batch.json")
        self._sleep = sleep
        self._backoff = backoff or Backoff()
        self._display = open_progress(quiet)
        self._began: tuple[float, int] | None = None
        try:
            # A service without keys derives the tenant from the token that is sent.
            self._client = Client(
                url,
                api_key or "none",
                timeout=timeouts or httpx.Timeout(60.0),
                sleep=sleep,
                transport=transport,
            )
        except ServiceError as error:
            raise RunError(f"--url {error.message}") from None

    @classmethod
    def of(cls, options: SimpleNamespace, api_key: str | None) -> "APIRun":
        """Return the run of a command line."""
        return cls(
            Path(options.input),
            options.output,
            url=options.url,
            api_key=api_key,
            window=options.window,
            retries=options.retries,
            timeouts=timeouts(options),
            overwrite=options.overwrite,
            quiet=options.quiet,
        )

    def run(self) -> JSON:
        """Run to the end; return the batch.

        Raises:
            RunError: The run can't continue.
            KeyboardInterrupt: The run was interrupted; the batch continues.
        """
        try:
            with self._client:
                note = self._note()
                batch = self._wait(note)
                if batch["status"] == "failed" and not batch["request_counts"]["total"]:
                    self._note_path.unlink(missing_ok=True)
                    raise CommandError(_refusal(self._input, batch))
                self._download(batch["output_file_id"], self.output)
                self._download(batch["error_file_id"], self.errors)
                return batch
        finally:
            self._display.end()

    @property
    def batch_id(self) -> str:
        """Id of the batch, if it was created."""
        try:
            return str(from_json(self._note_path.read_bytes()).get("batch") or "")
        except (OSError, ValueError, AttributeError):
            return ""

    def _note(self) -> JSON:
        """Return the note of this run, with the id of its batch."""
        digest, endpoint = self._look_at_input()
        note: JSON | None = None
        if self._note_path.exists() and not self._overwrite:
            try:
                note = from_json(self._note_path.read_bytes())
                before = note["input"]
            except (OSError, ValueError, KeyError, TypeError):
                raise CommandError(
                    f"{self._note_path}: can't be read; --overwrite begins anew, with another batch"
                ) from None
            if before != digest:
                raise CommandError(
                    f"{self._input}: not the file of the batch in {self._note_path}; name another OUTPUT, or "
                    "begin anew with --overwrite"
                )
        again = note is not None
        if note is None:
            note = {"input": digest, "run": uuid4().hex, "at": int(time.time()), "file": None, "batch": None}
            self._write_note(note)
        if note["file"] is None:
            self._display.say(f"uploading {self._input} ({self._input.stat().st_size:,} bytes)")
            note["file"] = self._upload(note, again)
            self._write_note(note)
        if note["batch"] is None:
            note["batch"] = self._create(note, endpoint, again)
            self._write_note(note)
        self._display.say(f"batch {note['batch']}")
        return note

    def _look_at_input(self) -> tuple[str, str]:
        """Return a hash of the input, and the route of its first row."""
        digest = hashlib.sha256()
        endpoint: Any = None
        try:
            with self._input.open("rb") as file:
                for line in file:
                    digest.update(line)
                    if endpoint is None and line.strip():
                        endpoint = _endpoint(self._input, line)
        except OSError as error:
            raise CommandError(f"{self._input}: {error.strerror or error}") from None
        if endpoint is None:
            raise CommandError(f"{self._input}: has no rows")
        return digest.hexdigest(), endpoint

    def _upload(self, note: JSON, again: bool) -> str:
        name = f"{note['run']}-{self._input.name}"

        def send() -> httpx.Response:
            with self._input.open("rb") as file:
                return self._client.http.post(
                    "/v1/files", data={"purpose": "batch"}, files={"file": (name, file)}
                )

        return self._made("upload", "/v1/files", send, note, lambda file: file.get("filename") == name, again)

    def _create(self, note: JSON, endpoint: str, again: bool) -> str:
        body = {
            "input_file_id": note["file"],
            "endpoint": endpoint,
            "completion_window": self._window,
            "metadata": {RUN: note["run"]},
        }

        def is_mine(batch: JSON) -> bool:
            metadata = batch.get("metadata")
            return isinstance(metadata, dict) and metadata.get(RUN) == note["run"]

        send = partial(self._client.http.post, "/v1/batches", json=body)
        return self._made("create", "/v1/batches", send, note, is_mine, again)

    def _made(
        self,
        what: str,
        path: str,
        send: Callable[[], httpx.Response],
        note: JSON,
        is_mine: Callable[[JSON], bool],
        again: bool,
    ) -> str:
        """Make a file or a batch once, also if the answer of an earlier try was lost; return its id.

        Args:
            what: Name of the call, for messages.
            path: The route, which also lists the files or the batches.
            send: Makes the file or the batch.
            note: The note of the run.
            is_mine: Returns whether an item of the list belongs to this run.
            again: Whether an earlier process may have made the file or the batch.
        """
        unsure = again

        def once() -> httpx.Response:
            nonlocal unsure
            if unsure and (found := self._find(path, note, is_mine)):
                return httpx.Response(200, json=found)
            unsure = True
            try:
                return send()
            except httpx.ConnectError:
                # Nothing was sent.
                unsure = False
                raise

        return str(self._call(what, once, "id")["id"])

    def _find(self, path: str, note: JSON, is_mine: Callable[[JSON], bool]) -> JSON | None:
        """Return the file or the batch of this run; None: there is none. Newest items are listed first."""
        after: JSON = {}
        while True:
            params = {"limit": 100, **after}
            page = self._call("list", partial(self._client.http.get, path, params=params), "data")
            data = page["data"]
            items = [one for one in data if isinstance(one, dict)] if isinstance(data, list) else []
            if mine := [one for one in items if "id" in one and is_mine(one)]:
                return mine[0]
            if not page.get("has_more") or not items:
                return None
            if items[-1]["created_at"] < note.get("at", 0) - SKEW_S:
                return None
            after = {"after": items[-1]["id"]}

    def _shown(self, batch: JSON) -> Shown:
        counts = batch["request_counts"]
        total, done = counts["total"], counts["completed"] + counts["failed"]
        parts = [batch["status"]]
        if total:
            parts.append(f"{done:,}/{total:,} rows")
        if counts["failed"]:
            parts.append(f"{counts['failed']:,} failed")
        now = time.monotonic()
        if self._began is None:
            self._began = now, done
        since, before = self._began
        if done > before and now > since:
            rate = (done - before) / (now - since)
            parts += [f"{rate:,.1f} rows/s", f"ETA {eta(done, total, rate)}"]
        return Shown(", ".join(parts), done, total or None, last=batch["status"] in ENDED)

    def _wait(self, note: JSON) -> JSON:
        wait_s = FIRST_POLL_S
        while True:
            batch = self._call(
                "poll", lambda: self._client.http.get(f"/v1/batches/{note['batch']}"), *FIELDS, patient=True
            )
            self._display.show(*self._shown(batch))
            if batch["status"] in ENDED:
                return batch
            self._sleep(wait_s)
            wait_s = min(MOST_POLL_S, wait_s * 1.5)

    def _download(self, file: str | None, path: Path) -> None:
        """Write a file of the service to the disk; without a file, delete the file of an earlier run."""
        try:
            if file is None:
                path.unlink(missing_ok=True)
                return
            part = path.with_name(f"{path.name}.part")

            def send() -> httpx.Response:
                with self._client.http.stream("GET", f"/v1/files/{file}/content") as response:
                    if response.is_success:
                        with part.open("wb") as out:
                            for piece in response.iter_bytes(PIECE_BYTES):
                                out.write(piece)
                            out.flush()
                            os.fsync(out.fileno())
                        return httpx.Response(200, json={})
                    response.read()
                    return response

            self._call("download", send)
            part.replace(path)
        except OSError as error:
            raise output_error(path, error) from None

    def _call(
        self, what: str, send: Callable[[], httpx.Response], *fields: str, patient: bool = False
    ) -> JSON:
        """Make a call until it is answered; return its JSON.

        Args:
            what: Name of the call, for messages.
            send: Makes the call once.
            fields: Fields that its answer must have.
            patient: Whether to wait for a lost service without end, since the batch runs there.
        """
        most = None if patient else self._retries
        try:
            response = self._client.call(send, Retries(most, self._backoff, self._tell))
        except ServiceError as error:
            if not error.retryable:
                raise RunError(f"{what}: {error.message}") from None
            raise gave_up(GaveUpError(self._retries + 1, f"the {what}", error.message)) from None
        body = json_of(response) or {}
        if missing := [field for field in fields if field not in body]:
            # For example the page of a proxy that asks for a login.
            raise RunError(
                f"{what}: {self._client.url} answers {response.status_code} without {missing[0]!r}, so it "
                f"isn't saturate: {response.text.strip()[:100]!r}"
            )
        return body

    def _tell(self, error: ServiceError) -> None:
        self._display.say(f"trying again: {error.message}")

    def _write_note(self, note: JSON) -> None:
        with written(self._note_path), drafted(self._note_path) as draft:
            draft.write_bytes(to_json(note))


def timeouts(options: SimpleNamespace) -> httpx.Timeout:
    """Return the timeouts of a command line, in seconds."""
    return httpx.Timeout(
        connect=options.connect_timeout,
        read=options.read_timeout,
        write=options.write_timeout,
        # The number of connections has no bound of its own.
        pool=None,
    )


def _endpoint(input: Path, line: bytes) -> str:
    try:
        url = from_json(line)["url"]
    except (ValueError, KeyError, TypeError):
        url = None
    if not isinstance(url, str):
        raise CommandError(
            f"{input}: the first line is not a request of OpenAI's batch format, such as "
            '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
        )
    return url


def errors_of(batch: JSON) -> list[str]:
    """Return the errors of a batch, for people."""
    return [
        f"  line {error['line']}: {error['message']}" if error.get("line") else f"  {error['message']}"
        for error in (batch["errors"] or {"data": []})["data"]
    ]


def _refusal(input: Path, batch: JSON) -> str:
    return "\n".join([f"{input}: the service refuses this file:", *errors_of(batch)])
