"""The command that serves a config: what it checks first, what it says, and that it leaves nothing behind."""

import json
import multiprocessing
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import yaml

import serve_app.cli.serve
from serve_app.cli.serve import (
    OPEN_FILES,
    Dashboard,
    LaunchError,
    Progress,
    allow_open_files,
    answer_s,
    forget_dead_cluster,
    launch,
    read_config,
    wait_ready,
)

LIMIT_S = 20.0
ROOT = Path(__file__).parents[3]


def config(port: int = 8000, **args: Any) -> dict[str, Any]:
    models = [{"id": "demo", "source": "saturate://demo"}]
    app = {"name": "llm", "import_path": "serve_app.app:build", "args": {"models": models} | args}
    return {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [app]}


def write(folder: Path, content: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of the loopback interface that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


# Reading a config


def test_the_config_in_this_repository_is_read() -> None:
    schema = read_config(ROOT / "configs/local.yaml")
    assert schema.http_options.port == 8000
    assert [app.name for app in schema.applications] == ["llm"]


def problem(path: Path) -> str:
    with pytest.raises(LaunchError) as caught:
        read_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


def test_answers_get_the_time_to_end_that_the_config_gives_them(tmp_path: Path) -> None:
    content = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    assert answer_s(read_config(write(tmp_path, content))) == 120
    content["applications"][0]["runtime_env"]["env_vars"]["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] = "900"
    assert answer_s(read_config(write(tmp_path, content))) == 900


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert problem(tmp_path / "none.yaml").endswith("No such file or directory")
    assert problem(tmp_path).endswith("Is a directory")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1", "line 1"),
        ("", "valid dictionary"),
        ("- 1", "valid dictionary"),
        ("applications:\n- import_path: 5", "import_path"),
        ("http_options: {port: x}\napplications: []", "port"),
    ],
)
def test_a_file_that_is_no_serve_config(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in problem(write(tmp_path, text))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: 2026-99-99"], ids=["binary", "impossible date"])
def test_a_file_that_yaml_can_not_decode(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    problem(path)


def test_every_mistake_in_our_args_is_named_with_its_path(tmp_path: Path) -> None:
    message = problem(write(tmp_path, config(ingress={"max_prompts": 0}, modles=[])))
    assert "args.ingress.max_prompts: " in message
    assert "args.modles: unknown key; allowed here: models, ingress" in message


def test_keys_that_can_not_be_read_are_a_mistake_of_the_config(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    content = config(access={"keys_file": str(keys)})
    assert f"access.keys_file ({keys}): No such file or directory" in problem(write(tmp_path, content))
    keys.write_text("- {name: ada}")
    assert "[0].sha256: Field required" in problem(write(tmp_path, content))
    keys.write_text("[]")
    read_config(write(tmp_path, content))


def test_keys_may_be_in_the_environment_that_the_config_gives(tmp_path: Path) -> None:
    content = config(access={"keys_env": "SATURATE_TEST_KEYS"})
    assert "no variable SATURATE_TEST_KEYS" in problem(write(tmp_path, content))
    content["applications"][0]["runtime_env"] = {"env_vars": {"SATURATE_TEST_KEYS": "[]"}}
    read_config(write(tmp_path, content))


def test_a_service_that_is_open_to_the_network_is_warned_of(tmp_path: Path, taken: int) -> None:
    content = config(taken)
    content["http_options"]["host"] = "0.0.0.0"
    command = Command(tmp_path, str(write(tmp_path, content)))
    assert command.wait() == 1
    assert command.said.startswith("WARNING: this service listens on 0.0.0.0 and asks for no API key.")


def test_the_part_of_the_config_that_running_engines_take_in_is_checked_too(tmp_path: Path) -> None:
    content = config()
    content["applications"][0]["deployments"] = [
        {"name": "Engine:demo", "user_config": {"batcher": {"x": 1}}}
    ]
    assert "user_config.batcher.x: unknown key; allowed here: capacity_tokens" in problem(
        write(tmp_path, content)
    )
    # What a function does with its own is its own affair.
    content["applications"][0]["deployments"][0]["name"] = "Engine:other"
    read_config(write(tmp_path, content))


def test_another_application_s_args_are_not_ours_to_check(tmp_path: Path) -> None:
    content = config()
    other = {"name": "o", "route_prefix": "/o", "import_path": "o:build", "args": {"x": 1}}
    content["applications"].append(other)
    assert len(read_config(write(tmp_path, content)).applications) == 2


def test_nothing_starts_where_the_port_is_taken(
    tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    path = write(tmp_path, config(taken))
    with pytest.raises(LaunchError, match=rf"port {taken} on 127\.0\.0\.1 .*in use.*http_options\.port"):
        launch(path, verbose=False)


# What a person sees


def test_progress_has_a_line_for_each_stage_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(None)
    for stage in ("starting Ray", "starting Ray", "demo: starting"):
        progress.show(stage)
    progress.end("Ready")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1] for line in lines] == ["starting Ray", "demo: starting", "Ready"]
    assert all(line.startswith("[  0 s] ") for line in lines)


def test_the_end_of_the_log_is_shown_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "serve.log"
    log.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % i for i in range(100)))
    Progress(log).show_log(lines=3)
    assert capsys.readouterr().err == f"line 97\nline 98\nline 99\n\nthe whole log: {log}\n"


# The command

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
"""Starts Python and imports what the command needs once, for all that follows."""


def _nothing() -> None:
    """Do nothing; a lambda would not cross to another process."""


class Command:
    """The command, in a process of its own.

    Args:
        folder: Where it works.
        arguments: Its arguments.
        before: Called in its process first.

    Attributes:
        said: What it has said so far.
    """

    def __init__(self, folder: Path, *arguments: str, before: Callable[[], None] = _nothing) -> None:
        self.said = ""
        self._folder = folder
        self._stderr, stderr = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=self._run, args=(folder, arguments, before, stderr))
        self._process.start()
        stderr.close()

    @staticmethod
    def _run(
        folder: Path, arguments: tuple[str, ...], before: Callable[[], None], stderr: Connection
    ) -> None:
        os.chdir(folder)
        os.dup2(stderr.fileno(), 2)
        stderr.close()
        tempfile.tempdir = str(folder)
        # `serve` is looked for beside Python; Ray's dashboard is not there.
        sys.executable = str(folder / "python")
        serve_app.cli.serve.DASHBOARDS = [f"http://127.0.0.1:{free_port()}"]
        sys.argv = ["launch", *arguments]
        before()
        serve_app.cli.serve.main()

    def _read(self, deadline: float) -> str:
        readable, _, _ = select.select([self._stderr], [], [], max(0, deadline - time.monotonic()))
        assert readable, f"no word and no end: {self.said}"
        piece = os.read(self._stderr.fileno(), 10_000).decode()
        self.said += piece
        return piece

    def hear(self, text: str) -> None:
        """Wait until it has said `text`."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.said:
            assert self._read(deadline), f"it ended: {self.said}"

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid
        os.kill(self._process.pid, number)

    def wait(self) -> int:
        """Return the exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self._read(deadline):
            pass
        self._process.join(LIMIT_S)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def processes(self) -> list[int]:
        """Return what lives of the processes that it has started: all work in its folder."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (process / "cwd").readlink() == self._folder and int(process.name) != self._process.pid:
                    found.append(int(process.name))
        return found

    def end(self) -> None:
        """End it and what it has left."""
        self._process.kill()
        self._process.join(LIMIT_S)
        for pid in self.processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def test_the_module_is_a_command(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "serve_app.cli.serve", str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        f"error: {path}: No such file or directory\n",
    )


def test_wrong_args_end_the_command_at_once(tmp_path: Path) -> None:
    command = Command(tmp_path, str(write(tmp_path, config(ingress={"x": 1}))))
    assert command.wait() == 1
    assert "args.ingress.x: unknown key; allowed here: max_body_bytes, body_timeout_s, max_" in command.said
    assert "Traceback" not in command.said


def test_a_taken_port_ends_the_command_at_once(tmp_path: Path, taken: int) -> None:
    command = Command(tmp_path, str(write(tmp_path, config(taken))))
    assert command.wait() == 1
    assert command.said.startswith(f"error: port {taken} on 127.0.0.1 can't be used (Address already in use)")
    assert "Traceback" not in command.said


def test_too_few_open_files_for_haproxy_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with pytest.raises(LaunchError, match=r"HAProxy needs 10,300 open files, and 1,024 are allowed here"):
        launch(write(tmp_path, config(free_port())), verbose=False)


def test_open_files_are_raised_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    for hard in (1024, OPEN_FILES, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (512, hard))
        allow_open_files()
    assert raised == [(512, OPEN_FILES)]


def test_no_config_is_an_error_of_usage(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert command.wait() == 2
    assert "the following arguments are required: config" in command.said


# The life of a service, with a stand-in for `serve run`

SERVE = """#!{python}
import http.server, json, os, signal, subprocess, sys, yaml
print("serve's own log", flush=True)
if {fails}:
    sys.exit(3)
port = yaml.safe_load(open(sys.argv[2]))["http_options"]["port"]
# Something that outlives `serve run`, in a session of its own, as Ray's processes are.
subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
states = ["starting", "starting", "ready"]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        state = states.pop(0) if len(states) > 1 else states[0]
        ready = state == "ready"
        body = json.dumps({{"status": "ok" if ready else state, "models": {{"demo": {{"state": state}}}}}})
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass

server = http.server.HTTPServer(("127.0.0.1", port), Handler)
try:
    server.serve_forever()
except KeyboardInterrupt:
    open("stopped", "w")
"""


class Service(Command):
    """The command on a config, with a `serve` that is the test's."""

    def __init__(self, folder: Path, *, fails: bool = False, before: Callable[[], None] = _nothing) -> None:
        port = free_port()
        serve = folder / "serve"
        serve.write_text(SERVE.format(python=sys.executable, fails=fails))
        serve.chmod(0o755)
        self._ready = f"Ready: http://127.0.0.1:{port}"
        super().__init__(folder, str(write(folder, config(port))), before=before)

    def hear_ready(self) -> None:
        self.hear(self._ready)

    @property
    def stopped_in_order(self) -> bool:
        return (self._folder / "stopped").exists()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services = []

    def start(**options: Any) -> Service:
        services.append(Service(tmp_path, **options))
        return services[-1]

    yield start
    for service in services:
        service.end()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_service_in_order_and_leaves_nothing(
    start: Callable[..., Service], number: signal.Signals
) -> None:
    service = start()
    service.hear_ready()
    assert "demo: starting" in service.said
    assert "serve's own log" not in service.said
    # `serve`, and what it has started in a session of its own.
    assert len(service.processes()) == 3
    service.signal(number)
    # A second one, from an impatient hand, doesn't break off the stop.
    service.hear("Stopping")
    service.signal(number)
    assert service.wait() == 0
    assert service.stopped_in_order
    assert service.processes() == []
    assert "Traceback" not in service.said


def test_a_service_that_can_not_start_is_told_with_the_end_of_its_log(start: Callable[..., Service]) -> None:
    service = start(fails=True)
    assert service.wait() == 1
    assert "error: `serve run` failed, with exit code 3" in service.said
    assert "serve's own log" in service.said
    assert "the whole log: " in service.said
    assert "Traceback" not in service.said


def test_a_service_that_ends_by_itself_is_told_and_leaves_nothing(start: Callable[..., Service]) -> None:
    service = start()
    service.hear_ready()
    for pid in service.processes():
        with suppress(OSError):
            if b"run" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
    assert service.wait() == 1
    assert "error: `serve run` ended by itself, with exit code -9" in service.said
    assert service.processes() == []


def _signal_while_serve_is_started() -> None:
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        process = popen(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    subprocess.Popen = start  # type: ignore[assignment, misc]


def test_a_signal_that_comes_while_serve_is_being_started_leaves_nothing(
    start: Callable[..., Service],
) -> None:
    service = start(before=_signal_while_serve_is_started)
    code = service.wait()
    assert service.processes() == []
    assert "Traceback" not in service.said
    assert code == 0


def _signal_while_another_is_handled() -> None:
    say = Progress.end

    def end(self: Progress, message: str) -> None:
        if message.startswith("Stopping"):
            os.kill(os.getpid(), signal.SIGTERM)
        say(self, message)

    Progress.end = end  # type: ignore[method-assign]


def test_a_signal_that_comes_while_another_is_handled_does_not_break_off_the_stop(
    start: Callable[..., Service],
) -> None:
    service = start(before=_signal_while_another_is_handled)
    service.hear_ready()
    service.signal(signal.SIGINT)
    code = service.wait()
    assert service.stopped_in_order
    assert service.processes() == []
    assert "Traceback" not in service.said
    assert code == 0


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], list[str]]]:
    """Plays Ray's dashboard: takes what it shall answer, returns the list of what it is asked."""
    servers = []

    def play(details: dict[str, Any]) -> list[str]:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
                asked.append(f"{self.command} {body}".strip())
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(details).encode())

            do_GET = do_PUT = _answer  # noqa: N815

            def log_message(self, *args: object) -> None:
                """Keep quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urls = [f"http://127.0.0.1:{free_port()}/", f"http://127.0.0.1:{server.server_port}/"]
        monkeypatch.setattr("serve_app.cli.serve.DASHBOARDS", urls)
        return asked

    yield play
    for server in servers:
        server.shutdown()


def test_the_dashboard_of_another_ray_is_not_ours(
    dashboard: Callable[[dict[str, Any]], list[str]],
) -> None:
    dashboard({"http_options": {"port": 8000}, "applications": {"llm": {"status": "RUNNING"}}})
    assert Dashboard(8001).applications() == {}
    assert Dashboard(8000).applications() == {"llm": {"status": "RUNNING"}}


def test_applications_are_taken_down_by_an_empty_config(
    dashboard: Callable[[dict[str, Any]], list[str]],
) -> None:
    asked = dashboard({"http_options": {"port": 8000}, "applications": {"llm": {"status": "RUNNING"}}})
    ours = Dashboard(8000)
    ours.applications()
    ours.take_down()
    assert asked == ["GET", 'PUT {"applications":[]}']


def test_a_deployment_that_fails_is_told_with_its_error_and_no_stack_trace(
    dashboard: Callable[[dict[str, Any]], list[str]],
) -> None:
    port = free_port()
    trace = (
        'Traceback:\n  File "x.py", line 3, in __init__\n    load()\n    ^^^^^^\n'
        "OSError: no such model\n  at all"
    )
    engine = {"status": "DEPLOY_FAILED", "message": trace}
    app = {"status": "DEPLOY_FAILED", "message": "failed", "deployments": {"Engine:demo": engine}}
    dashboard({"http_options": {"port": port}, "applications": {"llm": app}})
    with subprocess.Popen(["sleep", "30"]) as serve:
        progress, stop = Progress(None), threading.Event()
        with pytest.raises(LaunchError) as caught:
            wait_ready(serve, f"http://127.0.0.1:{port}", Dashboard(port), progress, stop)
        serve.kill()
    assert str(caught.value) == (
        "the application 'llm' could not start: Engine:demo: OSError: no such model\n  at all"
    )


def test_a_cluster_that_is_gone_is_forgotten_and_one_that_runs_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    note = tmp_path / "ray_current_cluster"
    monkeypatch.setattr("serve_app.cli.serve.get_ray_address_file", lambda folder: str(note))
    monkeypatch.setattr("serve_app.cli.serve.read_ray_address", lambda: note.exists() and note.read_text())
    note.write_text(f"127.0.0.1:{taken}")
    forget_dead_cluster()
    assert note.exists()
    note.write_text(f"127.0.0.1:{free_port()}")
    forget_dead_cluster()
    assert not note.exists()
    forget_dead_cluster()
