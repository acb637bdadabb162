"""`saturate batch --api` against the routes, on a port of this machine."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.dataset.api import APIRun
from serve_app.rows.errors import RunError
from tests.fakes.service import Reply, serving
from tests.serve_app.dataset import command_line
from tests.serve_app.dataset.batch_site import batch_site
from tests.serve_app.jobs.helpers import row, text_of


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with batch_site(tmp_path / "site", lambda id: 400 if id.startswith("bad") else 200) as url:
        yield url


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return write(tmp_path / "requests.jsonl", "a", "b")


@pytest.fixture
def httpserver() -> Iterator[Callable[[Any], str]]:
    """Starts a server that answers everything with one page, a text or JSON; returns its URL."""
    with ExitStack() as stack:
        yield lambda page: stack.enter_context(serving(lambda asked: Reply(page))).url


def write(path: Path, *ids: str) -> Path:
    path.write_bytes(text_of(*(row(id) for id in ids)))
    return path


batch = partial(command_line.batch, "--api")


def ids(path: Path) -> set[str]:
    return {json.loads(line)["custom_id"] for line in path.read_text().splitlines()}


def test_a_file_is_uploaded_run_and_downloaded(
    url: str, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(requests, "--url", f"{url}/v1") == 0
    output = requests.with_name("requests.output.jsonl")
    assert ids(output) == {"a", "b"}
    assert not requests.with_name("requests.errors.jsonl").exists()
    printed = capsys.readouterr()
    assert printed.out == f"completed: 2 of 2 rows are in {output}\n"
    assert "completed, 2/2 rows" in printed.err


def test_the_options_of_the_batch_api_are_taken(
    url: str, requests: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEY", "none")
    assert batch(requests, "--url", url, "--quiet") == 0
    options = [f"--{name}-timeout=7" for name in ("connect", "read", "write")]
    options += ["--api-key-env=KEY", "--window=2h", "--retries=7", "--overwrite", "--quiet"]
    assert batch(requests, "--url", url, *options) == 0
    assert made(url) == [2, 2]
    asked = httpx.get(f"{url}/v1/batches", headers={"authorization": "Bearer none"}).json()["data"]
    assert [one["completion_window"] for one in asked] == ["2h", "24h"]
    assert capsys.readouterr() == ("", "")


def test_the_service_is_on_this_machine_unless_another_is_named(
    requests: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError(f"refused by {request.url.netloc.decode()}")

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", refuse)
    for url, host in (([], "127.0.0.1:8000"), (["--url", "http://other"], "other")):
        assert batch(requests, *url, "--retries", 0) == 1
        assert f"refused by {host})" in capsys.readouterr().err


def test_failed_rows_are_in_a_file_of_their_own(url: str, tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", "a", "bad")
    assert batch(requests, tmp_path / "out.jsonl", "--url", url, "--quiet") == 3
    assert ids(tmp_path / "out.jsonl") == {"a"}
    assert ids(tmp_path / "out.errors.jsonl") == {"bad"}


@pytest.mark.parametrize("status", ["cancelled", "expired", "failed"])
def test_a_batch_that_ends_early_is_not_done(
    status: str, httpserver: Callable[[Any], str], requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = {"code": "api_key_disabled", "message": "The API key 'ada' is disabled", "line": None}
    counts = {"total": 2, "completed": 0, "failed": 0}
    page = {"id": "b", "status": status, "request_counts": counts, "errors": {"data": [reason]}, "data": []}
    files = {"output_file_id": None, "error_file_id": None}
    assert batch(requests, "--url", httpserver(page | files)) == 3
    printed = capsys.readouterr()
    assert printed.out == f"{status}: 0 of 2 rows have an answer; there is no output\n"
    assert "The API key 'ada' is disabled" in printed.err


def test_a_refused_file_is_told_by_its_lines(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_bytes(text_of(row("a"), b"{", row("a")))
    assert batch(requests, "--url", url) == 2
    printed = capsys.readouterr().err
    assert "line 2: This line is not valid JSON" in printed
    assert "line 3: custom_id must be unique" in printed
    # Nothing is left that would keep the next try from beginning anew.
    write(requests, "a")
    assert batch(requests, "--url", url, "--quiet") == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "has no rows"),
        (b"\n\n", "has no rows"),
        (b"no json\n", "first line is not a request"),
        (b'{"prompt": "x"}\n', "first line is not a request"),
        (b'{"url": 3}\n', "first line is not a request"),
    ],
)
def test_a_file_of_something_else_is_refused(
    text: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_bytes(text)
    assert batch(requests, "--url", "http://127.0.0.1:9") == 2
    assert reason in capsys.readouterr().err
    assert batch(tmp_path / "none.jsonl") == 2


class Calls(httpx.HTTPTransport):
    """A connection that a test may break before or after a call."""

    def __init__(self, broken: Callable[[httpx.Request, int], str | int | None]) -> None:
        super().__init__()
        self._broken = broken
        self.made: list[tuple[str, str]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.made.append((request.method, request.url.path))
        fault = self._broken(request, self.made.count(self.made[-1]))
        if isinstance(fault, int):
            return httpx.Response(fault, request=request, json={"error": {"message": "not now"}})
        if fault == "before":
            raise httpx.ConnectError("refused")
        response = super().handle_request(request)
        if fault == "after":
            response.read()
            raise httpx.ReadError("reset")
        return response


def run_of(requests: Path, url: str, calls: Calls, **options: Any) -> APIRun:
    return APIRun(requests, None, url=url, transport=calls, sleep=lambda _: None, quiet=True, **options)


def made(url: str) -> list[int]:
    """Return the numbers of the uploads and of the batches in the service."""
    paths = ("files?purpose=batch", "batches")
    answers = [httpx.get(f"{url}/v1/{path}", headers={"authorization": "Bearer none"}) for path in paths]
    return [len(answer.json()["data"]) for answer in answers]


def test_lost_answers_make_no_second_upload_or_batch(url: str, requests: Path) -> None:
    calls = Calls(lambda request, count: "after" if (request.method, count) == ("POST", 1) else None)
    assert run_of(requests, url, calls).run()["status"] == "completed"
    assert calls.made.count(("POST", "/v1/files")) == calls.made.count(("POST", "/v1/batches")) == 1
    assert made(url) == [1, 1]


def lost(path: str) -> Callable[[httpx.Request, int], str | None]:
    """Return a fault: the answer to the first POST of a path is lost."""
    return lambda request, count: (
        "after" if (request.method, request.url.path, count) == ("POST", path, 1) else None
    )


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_command_that_ended_before_its_answer_makes_nothing_twice(
    url: str, requests: Path, path: str
) -> None:
    class EndedError(BaseException):
        pass

    def wait(_: float) -> None:
        raise EndedError

    first = APIRun(requests, None, url=url, transport=Calls(lost(path)), sleep=wait, quiet=True)
    with pytest.raises(EndedError):
        first.run()
    assert run_of(requests, url, Calls(lambda *_: None)).run()["status"] == "completed"
    assert made(url) == [1, 1]


def test_a_service_that_comes_back_is_waited_for(url: str, requests: Path) -> None:
    calls = Calls(lambda _, count: (503, "before")[count - 1] if count <= 2 else None)
    batch = run_of(requests, url, calls, retries=2).run()
    assert batch["request_counts"]["completed"] == 2
    assert batch["metadata"].keys() == {"saturate_run"}


def test_a_service_that_stays_away_is_given_up(url: str, requests: Path) -> None:
    calls = Calls(lambda _, count: "before")
    with pytest.raises(RunError, match=r"gave up after 3 tries of the upload.*refused"):
        run_of(requests, url, calls, retries=2).run()


def test_a_refusal_is_not_repeated(url: str, requests: Path) -> None:
    calls = Calls(lambda _, count: 401)
    with pytest.raises(RunError, match=r"upload: .* answers 401 \(not now\)"):
        run_of(requests, url, calls).run()
    assert calls.made == [("POST", "/v1/files")]


PAGES: dict[str, Any] = {
    "a login page": "<html>Please log in</html>",
    "a list": [],
    "an object without an id": {"object": "file"},
    "nothing": "",
}


@pytest.mark.parametrize("page", PAGES)
def test_a_200_of_something_else_is_one_line(
    page: str, requests: Path, capsys: pytest.CaptureFixture[str], httpserver: Callable[[Any], str]
) -> None:
    url = httpserver(PAGES[page])
    assert batch(requests, "--url", url, "--retries", "0") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: upload: {url} answers 200 without 'id', so it isn't saturate: ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/batches", {"data": 5}),
        ("/v1/batches", {"data": [5, {}, {"metadata": 5}, {"metadata": {"saturate_run": "x"}}]}),
        ("/v1/batches", ["x"]),
    ],
)
def test_a_list_of_something_else_is_no_batch(url: str, requests: Path, path: str, body: Any) -> None:
    class Odd(Calls):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if (request.method, request.url.path) == ("GET", path):
                return httpx.Response(200, request=request, json=body)
            return super().handle_request(request)

    run = run_of(requests, url, Odd(lost(path)))
    if isinstance(body, dict):
        assert run.run()["status"] == "completed"
    else:
        with pytest.raises(RunError, match=r"list: .* answers 200 without 'data'"):
            run.run()


def test_an_interrupted_run_goes_on_with_its_batch(
    url: str, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    def polled(request: httpx.Request, count: int) -> str | None:
        return "before" if request.url.path.startswith("/v1/batches/") else None

    first = APIRun(requests, None, url=url, transport=Calls(polled), sleep=interrupt, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    id = first.batch_id
    assert id.startswith("batch_")
    calls = Calls(lambda *_: None)
    assert run_of(requests, url, calls).run()["id"] == id
    assert ("POST", "/v1/files") not in calls.made
    # A run that is complete is downloaded again, and an input that has changed is refused.
    assert run_of(requests, url, Calls(lambda *_: None)).run()["id"] == id
    write(requests, "c")
    assert batch(requests, "--url", url) == 2
    assert "not the file of the batch" in capsys.readouterr().err
    again = run_of(requests, url, calls, overwrite=True)
    assert again.run()["id"] != id
    assert ids(again.output) == {"c"}


def test_a_download_that_breaks_off_leaves_no_half_file(url: str, requests: Path) -> None:
    def broken(request: httpx.Request, count: int) -> int | None:
        return 500 if request.url.path.endswith("/content") else None

    run = run_of(requests, url, Calls(broken), retries=1)
    with pytest.raises(RunError, match="gave up after 2 tries of the download"):
        run.run()
    assert not run.output.exists()
