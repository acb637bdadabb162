"""The command `saturate batch`: its output, messages and exit codes, and how it resumes."""

import gzip
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from serve_app.api.protocol import JSON
from serve_app.client import Backoff
from tests.fakes.disk import failing_sync, full, small_files
from tests.progress import STILL_S, run, wait_until
from tests.serve_app.dataset.command_line import batch
from tests.serve_app.dataset.fake import FakeService, failure, listening

LIMIT_S = STILL_S


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def url(service: FakeService) -> Iterator[str]:
    with listening(service) as url:
        yield url


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", 100)


def write(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"id": f"q{n}", "prompt": f"p{n}"}) + "\n" for n in range(count)))
    return path


def start(*arguments: object, shell: str = ":") -> "subprocess.Popen[str]":
    """Start the command, behind a command of the shell."""
    return subprocess.Popen(
        [
            *("sh", "-c", f'{shell}; exec "$@"', "sh"),
            *(sys.executable, "-m", "serve_app.cli", "batch", *map(str, arguments)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rows(path: Path) -> list[JSON]:
    if path.suffix == ".parquet":
        found: list[JSON] = pq.read_table(path).to_pylist()
        return found
    return [json.loads(line) for line in path.read_text().splitlines()]


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the table that a run has printed, by the names of its lines."""
    return dict(
        re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != " "
    )


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_run(
    tmp_path: Path, questions: Path, url: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    assert batch(questions, out, "--url", url) == 0
    done = rows(out)
    assert [row["id"] for row in done] == [f"q{n}" for n in range(100)]
    assert [row["result"] for row in done] == [f"P{n}" for n in range(100)]
    assert done[5]["error"] is None
    assert done[5]["completion_tokens"] == 2
    printed = shown(capsys)
    assert printed["rows"] == "100: 100 with a result, 0 failed"
    assert printed["tokens"] == "290 in, 290 out"
    assert re.fullmatch(r"100 answered, 0 further tries; p50 .*, p90 .*, p99 .*", printed["calls"])
    assert "batcher" not in printed
    assert "this run" not in printed
    report = json.loads((tmp_path / f"{name}.report.json").read_text())
    assert report["outcome"] == "complete"
    assert report["this_run"]["calls"] == 100
    assert report["this_run"]["call_latency"]["p50_s"] > 0
    assert report["output_rows"]["prompt_tokens"] == sum(len(f"p{n}") for n in range(100))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        name,
        f"{name}.report.json",
        f"{name}.run.db",
    ]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_failed_rows_are_in_the_output_and_set_the_exit_code(
    tmp_path: Path,
    questions: Path,
    url: str,
    service: FakeService,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    service.refuses = {"p7": "too long"}
    assert batch(questions, tmp_path / name, "--url", url) == 3
    done = rows(tmp_path / name)
    assert "  invalid_request_error  1\n" in re.sub(" +", "  ", capsys.readouterr().out)
    assert [row["row"] for row in done if row["error"]] == [7]
    assert done[7]["error"] == {"type": "invalid_request_error", "message": "too long"}
    assert done[7]["result"] is None
    assert batch(questions, tmp_path / name, "--url", url) == 3, "a finished run has the same exit code again"
    assert len(service.calls) == 100


def test_each_row_in_flight_has_a_connection(
    tmp_path: Path, questions: Path, url: str, service: FakeService
) -> None:
    service.release.clear()
    out = tmp_path / "out.jsonl"
    driver = start(questions, out, "--url", url, "--concurrency", 100, shell="ulimit -Sn 64")
    try:
        wait_until(lambda: len(service.calls) == 100)
        service.release.set()
        assert driver.wait(LIMIT_S) == 0
    finally:
        driver.kill()
        driver.communicate()
    assert len(service.calls) == len(rows(out)) == 100


def test_options_reach_the_service(tmp_path: Path, questions: Path, url: str, service: FakeService) -> None:
    (tmp_path / "question.jinja").write_text("{{ id }}?")
    options = [
        "--max-tokens",
        9,
        "--temperature",
        0,
        "--stop",
        "a",
        "--stop",
        "b",
        "--model",
        "m",
    ]
    options += ["--service-tier", "default", "--limit", 3, "--id-column", "prompt"]
    options += ["--template", f"@{tmp_path}/question.jinja"]
    assert batch(questions, tmp_path / "out.jsonl", "--url", url, *options) == 0
    assert sorted(call["prompts"] for call in service.calls) == [["q0?"], ["q1?"], ["q2?"]]
    call = service.calls[0]
    shared = {"service_tier": "default", "partial": True, "details": True}
    sampling = {"max_tokens": 9, "temperature": 0, "stop": ["a", "b"]}
    left = {name: call[name] for name in call.keys() - {"prompts", "task_id"}}
    assert left == {"model": "m", **sampling, **shared}
    assert [row["id"] for row in rows(tmp_path / "out.jsonl")] == ["p0", "p1", "p2"]


def test_standard_input(tmp_path: Path, url: str) -> None:
    done = run(
        [sys.executable, "-m", "serve_app.cli", "batch", "-", tmp_path / "out.jsonl", "--url", url],
        input='{"prompt": "a"}\n{"prompt": "b"}\n',
    )
    assert done.returncode == 0, done.stderr
    assert [row["result"] for row in rows(tmp_path / "out.jsonl")] == ["A", "B"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "3"], "error: --temperature: Input should be less than or equal to 2, not 3.0"),
        (["--template", "{{ x"], "error: --template, line 1"),
        (["--template", "@nowhere"], "error: --template @nowhere: No such file"),
        (["--max-concurrency", "many"], "--concurrency: 'many' is not a valid"),
        (["--read-timeout", "-1"], "--read-timeout: -1.0 is not in the range"),
        (["--app", "llm"], "--url and --app: take one"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "error: --api-key-env NO_SUCH_VARIABLE: no such variable"),
        (["--overwrite", "--resume"], "not allowed with"),
    ],
)
def test_errors_of_usage_have_exit_code_2_and_no_stack_trace(
    tmp_path: Path,
    questions: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert batch(questions, tmp_path / "out.jsonl", "--url", "http://127.0.0.1:9", *options) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("input", "output", "message"),
    [
        ("nothing.jsonl", "out.jsonl", "no such file or folder"),
        ("in.jsonl", "out.txt", "must end in .jsonl or .parquet"),
        ("in.jsonl", "no/folder/out.jsonl", "there is no folder"),
        ("in.jsonl", "s3://bucket/out.jsonl", "has to be a local file"),
        ("in.jsonl", "in.jsonl", "no in.jsonl.run.db beside it"),
    ],
)
def test_a_file_that_can_not_be_used_is_an_error(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str], input: str, output: str, message: str
) -> None:
    before = questions.read_bytes()
    target = output if "://" in output else tmp_path / output
    assert batch(tmp_path / input, target, "--url", "http://127.0.0.1:9") == 2
    assert message in capsys.readouterr().err
    assert questions.read_bytes() == before


def test_the_error_of_a_wrong_column_lists_the_columns(
    tmp_path: Path, questions: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(questions, tmp_path / "out.jsonl", "--url", url, "--prompt-column", "question") == 2
    assert "no column 'question'; there are: id, prompt. Name the column" in capsys.readouterr().err


@pytest.mark.parametrize(
    "template", ["{{ question }}?", "{{ row.question }}?", "{{ prompt }} {{ question }}"]
)
def test_a_template_with_a_wrong_column_stops_at_once(
    tmp_path: Path,
    questions: Path,
    url: str,
    service: FakeService,
    template: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert batch(questions, tmp_path / "out.jsonl", "--url", url, "--template", template) == 2
    said = capsys.readouterr().err
    assert "'question'" in said
    assert "there are: id, prompt. Correct --template" in said
    assert not service.calls
    assert rows(tmp_path / "out.jsonl") == []
    assert batch(questions, tmp_path / "out.jsonl", "--url", url, "--template", "{{ prompt }}") == 0


def test_a_template_that_does_not_fit_some_rows_fails_these(tmp_path: Path, url: str) -> None:
    questions = tmp_path / "in.jsonl"
    questions.write_text('{"prompt": "a"}\n{"prompt": "b", "name": "x"}\n')
    assert batch(questions, tmp_path / "out.jsonl", "--url", url, "--template", "{{ name }}") == 3
    done = rows(tmp_path / "out.jsonl")
    assert [row["result"] for row in done] == [None, "X"]
    assert done[0]["error"]["type"] == "template_error"
    assert "'name' is undefined; there are: prompt" in done[0]["error"]["message"]


@pytest.mark.parametrize("end", ["/v1", "/v1/"])
def test_an_address_as_openai_clients_take_it(tmp_path: Path, questions: Path, url: str, end: str) -> None:
    assert batch(questions, tmp_path / "out.jsonl", "--url", url + end) == 0


@pytest.mark.parametrize(
    ("retries", "tries"),
    [(0, "1 try of a row"), (1, "2 tries of a row"), (3, "4 tries of a row")],
)
def test_the_tries_of_a_call_are_one_more_than_its_retries(
    tmp_path: Path,
    questions: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    retries: int,
    tries: str,
) -> None:
    monkeypatch.setattr("serve_app.rows.runner.Backoff", lambda: Backoff(0.001, 0.001))
    gone = ["--url", "http://127.0.0.1:9", "--retries", retries, "--max-concurrency", 1]
    assert batch(questions, tmp_path / "out.jsonl", *gone) == 1
    assert f"gave up after {tries}: " in capsys.readouterr().err


def test_a_service_that_does_not_answer_ends_the_run_with_exit_code_1(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str], service: FakeService, url: str
) -> None:
    gone = ["--url", "http://127.0.0.1:9", "--retries", "0"]
    assert batch(questions, tmp_path / "out.jsonl", *gone) == 1
    said = capsys.readouterr().err
    assert "gave up after" in said
    assert "run the same command again" in said
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["outcome"] == "failed"
    assert report["message"].startswith("gave up after 1 try of a row")
    assert batch(questions, tmp_path / "out.jsonl", "--url", url) == 0
    assert len(rows(tmp_path / "out.jsonl")) == 100


def test_changed_options_or_input_need_overwrite_or_resume(
    tmp_path: Path, questions: Path, url: str, service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert batch(questions, out, "--url", url) == 0
    whole = out.read_bytes()
    size = questions.stat().st_size

    assert batch(questions, out, "--url", url, "--temperature", 1) == 2
    said = capsys.readouterr().err
    assert "--temperature was null, is now 1.0" in said
    assert "--overwrite" in said
    assert "--resume" in said

    write(questions, 120)
    assert batch(questions, out, "--url", url) == 2
    changes = f"the input has changed: bytes {size} -> {questions.stat().st_size}, other content"
    assert changes in capsys.readouterr().err
    assert out.read_bytes() == whole

    assert batch(questions, out, "--url", url, "--resume") == 0
    assert [row["row"] for row in rows(out)] == list(range(120))
    assert set(service.served.values()) == {1}, "finished rows are not sent again"

    assert batch(questions, out, "--url", url, "--limit", 5, "--overwrite") == 0
    assert len(rows(out)) == 5


def test_speed_options_may_change_between_runs(
    tmp_path: Path, questions: Path, url: str, service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    service.trouble = lambda body: failure(400) if len(service.calls) > 20 else None
    assert batch(questions, out, "--url", url, "--max-concurrency", 10) == 1
    assert len(rows(out)) == 20
    service.trouble = lambda body: None
    assert batch(questions, out, "--url", f"{url}/", "--retries", 1) == 0
    assert shown(capsys)["this run"] == "80 rows; 20 were done before"
    assert json.loads((tmp_path / "out.jsonl.report.json").read_text())["rows_before"] == 20
    assert [row["row"] for row in rows(out)] == list(range(100))
    assert set(service.served.values()) == {1}


def test_an_interrupt_finishes_calls_in_flight(
    tmp_path: Path, questions: Path, url: str, service: FakeService
) -> None:
    out = tmp_path / "out.jsonl"
    service.release.clear()
    driver = start(questions, out, "--url", url, "--max-concurrency", 30)
    wait_until(lambda: len(service.calls) == 30)
    driver.send_signal(signal.SIGINT)
    assert driver.stderr
    for line in driver.stderr:
        if "Stopping: 30 calls in flight" in line:
            break
    service.release.set()
    printed, said = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 130
    assert "30 rows are in" in said
    assert "run the same command again to continue" in said
    assert "30: 30 with a result" in printed
    assert len(rows(out)) == 30

    assert batch(questions, out, "--url", url) == 0
    assert [row["row"] for row in rows(out)] == list(range(100))
    assert set(service.served.values()) == {1}


def test_a_second_interrupt_stops_at_once(
    tmp_path: Path, questions: Path, url: str, service: FakeService
) -> None:
    service.release.clear()
    driver = start(questions, tmp_path / "out.jsonl", "--url", url, "--concurrency", 10)
    wait_until(lambda: len(service.calls) == 10)
    driver.send_signal(signal.SIGINT)
    assert driver.stderr
    for line in driver.stderr:
        if "Stopping" in line:
            break
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 130
    assert rows(tmp_path / "out.jsonl") == []


def test_an_interrupt_ends_the_wait_for_a_pipe(tmp_path: Path, url: str, service: FakeService) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-m", "serve_app.cli", "batch", "-", tmp_path / "out.jsonl", "--url", url],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdin
    driver.stdin.write('{"prompt": "a"}\n' * 50)
    driver.stdin.flush()
    wait_until(lambda: service.served["a"] == 50)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(LIMIT_S) == 130
    assert len(rows(tmp_path / "out.jsonl")) == 50
    driver.stdin.close()
    assert driver.stderr
    driver.stderr.close()


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("out.jsonl", 2),
        *(pytest.param(name, 5, marks=pytest.mark.long) for name in ("out.jsonl", "out.parquet")),
    ],
)
def test_a_run_that_is_killed_ends_like_an_undisturbed_one(
    tmp_path: Path, url: str, service: FakeService, name: str, kills: int
) -> None:
    questions = write(tmp_path / "in.jsonl", 400)
    quiet = tmp_path / f"quiet-{name}"
    assert batch(questions, quiet, "--url", url) == 0
    service.served.clear()
    out = tmp_path / name
    arguments = [questions, out, "--url", url]
    for kill in range(kills):
        service.calls.clear()
        service.release.clear()
        service.held_from = 3 * kill
        driver = start(*arguments, "--max-concurrency", 4)
        wait_until(partial(lambda kill: len(service.calls) == 4 + 3 * kill, kill))
        driver.kill()
        driver.communicate(timeout=LIMIT_S)
        service.release.set()
    assert batch(*arguments) == 0
    assert rows(out) == rows(quiet)
    # Only calls in flight at a kill may have been served again.
    assert sum(service.served.values()) - 400 <= kills * 4


def test_two_drivers_cannot_write_one_output(
    tmp_path: Path, questions: Path, url: str, service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.release.clear()
    driver = start(questions, tmp_path / "out.jsonl", "--url", url)
    wait_until(lambda: service.calls)
    for options in ([], ["--overwrite"]):
        assert batch(questions, tmp_path / "out.jsonl", "--url", url, *options) == 2
        assert "another run is writing it" in capsys.readouterr().err
    service.release.set()
    driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0
    assert len(rows(tmp_path / "out.jsonl")) == 100


def test_a_terminal_shows_a_progress_bar(
    tmp_path: Path, questions: Path, url: str, service: FakeService
) -> None:
    service.release.clear()
    ours, theirs = pty.openpty()
    driver = subprocess.Popen(
        [sys.executable, "-m", "serve_app.cli", "batch", questions, tmp_path / "out.jsonl", "--url", url],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    while b"in flight" not in shown:
        shown += os.read(ours, 4096)
    service.release.set()
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert driver.wait(LIMIT_S) == 0
    for word in (b"rows/s", b"tok/s", b"ETA"):
        assert word in shown


def test_utilization_covers_this_run_only(
    tmp_path: Path, questions: Path, url: str, service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = {"busy_time_s": 100.0, "idle_time_s": 900.0, "running": 1, "queue_depth": 0}
    service.replicas = [{"replica": "a", "batcher": busy}]

    def work(body: JSON) -> None:
        busy["busy_time_s"] += 9.0
        busy["idle_time_s"] += 1.0

    service.trouble = work
    assert batch(questions, tmp_path / "out.jsonl", "--url", url) == 0
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["this_run"]["utilization"] == 0.9
    assert shown(capsys)["batcher"] == "90.0% of the time busy"


def test_the_table_of_a_run_without_rows_leaves_rates_out(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(write(tmp_path / "in.jsonl", 0), tmp_path / "out.jsonl", "--url", url) == 0
    assert shown(capsys).keys() == {"rows", "time", "output"}


def test_a_report_that_can_not_be_written_is_told(
    tmp_path: Path, questions: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "no" / "report.json"
    assert batch(questions, tmp_path / "out.jsonl", "--url", url, "--report", report) == 1
    assert f"error: --report {report}: there is no folder" in capsys.readouterr().err
    assert len(rows(tmp_path / "out.jsonl")) == 100


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_first_command_with_a_mistake_does_not_stand_in_the_way_of_the_corrected_one(
    tmp_path: Path, questions: Path, url: str, service: FakeService, name: str
) -> None:
    out = tmp_path / name
    assert batch(questions, out, "--url", url, "--prompt-column", "question") == 2
    service.trouble = lambda body: failure(404, "not_found_error", "model") if body.get("model") else None
    assert batch(questions, out, "--url", url, "--model", "wrong") == 1
    assert batch(questions, out, "--url", url) == 0
    assert len(rows(out)) == 100


# The disk


def test_rows_that_find_no_room_are_done_again(
    tmp_path: Path,
    url: str,
    service: FakeService,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = [os.urandom(200_000).hex() for _ in range(4)]
    questions = tmp_path / "in.jsonl"
    questions.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    out = tmp_path / "out.jsonl"
    service.release.clear()
    service.held_from = 1
    arguments = [questions, out, "--url", url]
    # One call is never answered: only the disk can end the run.
    with small_files(150_000):
        assert batch(*arguments, "--max-concurrency", 1) == 4
    said = capsys.readouterr().err
    assert "out.jsonl.run.db: " in said
    assert "run the same command again" in said
    assert "Traceback" not in said
    assert rows(out) == []
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert (report["outcome"], report["output_rows"]["rows"]) == ("failed", 0)

    service.release.set()
    assert batch(*arguments) == 0
    assert [row["result"] for row in rows(out)] == [prompt.upper() for prompt in prompts]
    assert service.served[prompts[0]] == 2


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_full_disk_ends_the_run_and_it_goes_on_once_there_is_room(
    tmp_path: Path,
    questions: Path,
    url: str,
    service: FakeService,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / name
    journal = out if out.suffix == ".jsonl" else tmp_path / f"{name}.journal.jsonl"
    arguments = [questions, out, "--url", url, "--max-concurrency", 10]
    with full(journal, 5000):
        assert batch(*arguments) == 4
        said = capsys.readouterr().err
        assert f"{journal.name}: No space left on device" in said
        assert "run the same command again" in said
        assert "Traceback" not in said
    done = len(rows(journal))
    assert 0 < done < 100
    assert batch(*arguments) == 0
    assert [row["row"] for row in rows(out)] == list(range(100))
    # Rows are recorded before their copy is written.
    assert 100 <= sum(service.served.values()) <= 110, "the rows on the disk are not sent again"


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_disk_that_fails_at_the_end(
    tmp_path: Path,
    questions: Path,
    url: str,
    service: FakeService,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / name
    with failing_sync(tmp_path / f"{name}.draft"):
        assert batch(questions, out, "--url", url) == 4
    assert f"{name}: Input/output error" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.draft"))
    calls = len(service.calls)
    assert batch(questions, out, "--url", url) == 0
    assert len(rows(out)) == 100
    assert len(service.calls) == calls


def test_a_report_that_can_not_be_replaced_stays_and_leaves_no_draft(
    tmp_path: Path, questions: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(questions, tmp_path / "out.jsonl", "--url", url) == 0
    report = tmp_path / "out.jsonl.report.json"
    before = report.read_bytes()
    with failing_sync(tmp_path / f"{report.name}.draft"):
        assert batch(questions, tmp_path / "out.jsonl", "--url", url, "--overwrite") == 4
    assert f"{report.name}: Input/output error" in capsys.readouterr().err
    assert report.read_bytes() == before
    assert not list(tmp_path.glob("*.draft"))


def test_a_disk_that_is_full_from_the_beginning(
    tmp_path: Path, questions: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    with small_files(1000):
        assert batch(questions, out, "--url", url) == 4
    assert "error: " in capsys.readouterr().err
    assert batch(questions, out, "--url", url) == 0


SMALL_DISK = """
mount -t tmpfs -o size={small} tmpfs {folder} || exit 77
{driver}; echo "first: $?"
mount -o remount,size=64m {folder}
{driver}; echo "second: $?"
cp {folder}/{name} {copy}
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("small", ["12k", "100k"])
def test_a_real_disk_that_is_full(
    tmp_path: Path, url: str, service: FakeService, name: str, small: str
) -> None:
    questions = write(tmp_path / "in.jsonl", 5000)
    (tmp_path / "disk").mkdir()
    command = [
        sys.executable,
        "-m",
        "serve_app.cli",
        "batch",
        questions,
        tmp_path / "disk" / name,
        "--url",
        url,
    ]
    script = SMALL_DISK.format(
        small=small,
        folder=tmp_path / "disk",
        driver=" ".join(map(str, command)),
        name=name,
        copy=tmp_path / name,
    )
    ran = run(["unshare", "--map-root-user", "--mount", "sh", "-c", script])
    if ran.returncode in (1, 77):
        pytest.skip(f"no disk can be mounted here: {ran.stderr}")
    assert "first: 4" in ran.stdout, ran.stdout + ran.stderr
    assert "second: 0" in ran.stdout, ran.stdout + ran.stderr
    # The database of the run meets the end of the disk before its copy does.
    assert "database or disk is full" in ran.stderr or "No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert [row["row"] for row in rows(tmp_path / name)] == list(range(5000))


# A broken file among good ones


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_storage_that_fails_is_not_taken_for_a_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another try may succeed: exit code 1."""
    text = b'{"prompt": "a"}\n'
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)

    class Gone(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError("the network is gone")

    gone = lambda *_, **__: Gone(text)  # noqa: E731
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem._open", gone)
    assert batch(tmp_path / "in", tmp_path / "out.jsonl", "--url", "http://127.0.0.1:9") == 1
    assert f"{name}: the network is gone" in capsys.readouterr().err


# Forms of the input


WRONG: dict[str, tuple[bytes, str]] = {
    "object.json": (
        b'{\n "data": []\n}\n',
        "a JSON value over several lines; write one object a line, or a l",
    ),
    "twice.csv": (b"prompt,id,prompt\na,1,b\n", "line 1: 2 columns have the name 'prompt'"),
    "semicolon.csv": (b"id;prompt\n1;a\n", "if ';' separates columns, say --separator ';'"),
    "tab.csv": (b"id\tprompt\n1\ta\n", "say --separator '\\t'"),
    "header.csv": (b'id,"prompt\n1,a\n', "line 1: unexpected end of data"),
    "bytes.csv": (b"id,\xff\n1,a\n", "line 1: not UTF-8"),
    "gzip.jsonl": (gzip.compress(b'{"prompt": "a"}\n'), "compressed with gzip: end its name in .gz"),
    "utf16.csv": ("id,prompt\n".encode("utf-16"), "UTF-16: convert it to UTF-8"),
    "zip.csv": (b"PK\x03\x04", "a zip archive: unpack it"),
    "parquet.jsonl": (b"PAR1", "say --input-format parquet"),
    "text.parquet": (b"nothing", "not a readable Parquet file"),
    "last.csv": (b'prompt\na\n"b\n', "line 3: unexpected end of data"),
    "last.jsonl": (b'{"prompt": "a"}\n{', "line 2: not valid JSON"),
    "last.json": (b'[{"prompt": "a"}, 5]', "element 2: must be a JSON object"),
    "last.jsonl.gz": (gzip.compress(b'{"prompt": "a"}\n')[:-8], "Compressed file"),
}
"""Files that are no dataset, or are broken at their end, and why."""


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_no_dataset_is_told_before_a_row_is_sent(
    tmp_path: Path, url: str, service: FakeService, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    content, message = WRONG[name]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.jsonl", 200)
    (tmp_path / "in" / name).write_bytes(content)
    write(tmp_path / "in" / "zz.jsonl", 1)
    assert batch(tmp_path / "in", tmp_path / "out.jsonl", "--url", url) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {name}")
    assert message in said
    assert service.calls == []


def test_a_json_array_and_another_separator(tmp_path: Path, url: str) -> None:
    (tmp_path / "in.json").write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=2))
    assert batch(tmp_path / "in.json", tmp_path / "out.jsonl", "--url", url) == 0
    (tmp_path / "in.csv").write_text("id|prompt\n1|a\n2|b\n")
    assert batch(tmp_path / "in.csv", tmp_path / "2.jsonl", "--url", url, "--separator", "|") == 0
    for name in ("out.jsonl", "2.jsonl"):
        assert [row["result"] for row in rows(tmp_path / name)] == ["A", "B"]


def test_a_process_substitution(tmp_path: Path, url: str) -> None:
    command = f'{sys.executable} -m serve_app.cli batch <(echo \'{{"prompt": "a"}}\') {tmp_path}/out.jsonl'
    done = run(["bash", "-c", f"{command} --url {url}"])
    assert done.returncode == 0, done.stderr
    assert [row["result"] for row in rows(tmp_path / "out.jsonl")] == ["A"]


def test_an_input_that_was_written_again_is_told(
    tmp_path: Path, questions: Path, url: str, service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(questions, tmp_path / "out.jsonl", "--url", url) == 0
    os.utime(questions, (1, 1))
    assert batch(questions, tmp_path / "out.jsonl", "--url", url) == 2
    assert "files of the same names and sizes were written again" in capsys.readouterr().err
    assert batch(questions, tmp_path / "out.jsonl", "--url", url, "--resume") == 0
    assert set(service.served.values()) == {1}


# A pipe that stays silent


@pytest.mark.parametrize(
    ("lines", "options", "code"),
    [
        ('{"prompt": "a"}\n' * 50, ["--url", "http://127.0.0.1:9", "--retries", "0"], 1),
        ('{"question": "a"}\n' * 50, ["--url", "http://127.0.0.1:9"], 2),
    ],
)
def test_a_run_that_fails_does_not_wait_for_its_input(
    tmp_path: Path, lines: str, options: list[str], code: int
) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-m", "serve_app.cli", "batch", "-", tmp_path / "out.jsonl", *options],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdin
    assert driver.stderr
    driver.stdin.write(lines)
    driver.stdin.flush()
    try:
        assert driver.wait(LIMIT_S / 3) == code
        assert "error: " in driver.stderr.read()
    finally:
        driver.kill()
        driver.stdin.close()
        driver.stderr.close()
        driver.wait()


def test_the_output_is_always_json(tmp_path: Path, url: str) -> None:
    questions = tmp_path / "in.jsonl"
    questions.write_text('{"id": NaN, "prompt": "a"}\n{"id": -Infinity, "prompt": "b", "score": NaN}\n')
    assert batch(questions, tmp_path / "out.jsonl", "--url", url) == 0
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    done = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [(row["id"], row["result"]) for row in done] == [(0, "A"), (1, "B")]
