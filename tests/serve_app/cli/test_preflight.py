"""Checks and preparations before a service starts."""

import os
import resource
from pathlib import Path

import pytest

from serve_app.cli.errors import LaunchError
from serve_app.cli.preflight import OPEN_FILES, allow_open_files, check_port, forget_dead_cluster, starts_ray
from serve_app.cli.runs import Run
from tests.ports import free_port


def test_a_port_of_another_program_is_an_error(taken: int) -> None:
    with pytest.raises(LaunchError, match=rf"port {taken} on 127\.0\.0\.1 .*in use.*http_options\.port"):
        check_port("127.0.0.1", taken, [])


def test_a_port_of_a_service_is_an_error_that_names_its_process(taken: int) -> None:
    run = Run(taken, os.getpid(), 0, 0)
    with pytest.raises(LaunchError) as caught:
        check_port("127.0.0.1", taken, [Run(1, 1, 0, 0), run])
    assert str(caught.value) == (
        f"a saturate serves on port {taken} already (pid {os.getpid()}); "
        f"`saturate stop --port {taken}` stops it"
    )


def test_a_free_port_is_no_error() -> None:
    check_port("127.0.0.1", free_port(), [])


def test_too_few_open_files_for_haproxy_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with pytest.raises(LaunchError, match=r"HAProxy needs 10,300 open files, and 1,024 are allowed here"):
        allow_open_files()


def test_open_files_are_raised_if_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    for hard in (1024, OPEN_FILES, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (512, hard))
        allow_open_files()
    assert raised == [(512, OPEN_FILES)]


def test_the_note_of_a_dead_cluster_is_removed_and_that_of_a_live_one_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    note = tmp_path / "ray_current_cluster"

    def read() -> str | None:
        return note.read_text() if note.exists() else None

    monkeypatch.setattr("serve_app.cli.preflight.get_ray_address_file", lambda folder: str(note))
    monkeypatch.setattr(
        "serve_app.cli.preflight.read_ray_address", lambda: note.exists() and note.read_text()
    )
    note.write_text(f"127.0.0.1:{taken}")
    forget_dead_cluster()
    assert note.exists()
    note.write_text(f"127.0.0.1:{free_port()}")
    forget_dead_cluster()
    assert not note.exists()
    forget_dead_cluster()


@pytest.mark.parametrize(
    ("address", "note", "starts"),
    [(None, None, True), ("local", None, True), ("auto", None, False), (None, "127.0.0.1:6379", False)],
)
def test_serve_run_starts_a_ray_unless_one_runs(
    monkeypatch: pytest.MonkeyPatch, address: str | None, note: str | None, starts: bool
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("serve_app.cli.preflight.read_ray_address", lambda: note)
    assert starts_ray() is starts
