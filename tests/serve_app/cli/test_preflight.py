"""Checks and preparations before a service starts."""

import resource
import stat
from pathlib import Path

import click
import pytest

from serve_app.cli.preflight import (
    allow_open_files,
    forget_dead_cluster,
    keep_token_private,
    starts_ray,
)
from tests.ports import free_port


def test_too_few_open_files_for_haproxy_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with pytest.raises(
        click.ClickException, match=r"HAProxy needs 8,292 open files, and 1,024 are allowed here"
    ):
        allow_open_files(12_000)
    # HAProxy has fewer connections then.
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 8292))
    allow_open_files(12_000)


def test_open_files_are_raised_if_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    for hard in (1024, 20_100, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (512, hard))
        allow_open_files(10_000)
    assert raised == [(512, 20_100)]


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


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_ray_finds_a_token_that_only_this_user_may_read(tmp_path: Path) -> None:
    keep_token_private({}, tmp_path)
    token = tmp_path / ".ray" / "auth_token"
    assert (mode(token.parent), mode(token)) == (0o700, 0o600)
    first = token.read_text()
    assert len(first) == 64
    keep_token_private({}, tmp_path)
    assert token.read_text() == first


def test_a_token_that_others_may_read_is_closed(tmp_path: Path) -> None:
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir(0o755)
    token.write_text("secret")
    token.chmod(0o644)
    keep_token_private({}, tmp_path)
    assert (mode(token.parent), mode(token), token.read_text()) == (0o700, 0o600, "secret")


@pytest.mark.parametrize(
    "environment",
    [{"RAY_AUTH_TOKEN": "secret"}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN_PATH": "/nowhere/token"}],
)
def test_ray_that_needs_no_new_token_gets_none(tmp_path: Path, environment: dict[str, str]) -> None:
    keep_token_private(environment, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_home_without_a_place_for_the_token_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".ray").write_text("a file")
    with pytest.raises(
        click.ClickException, match="auth_token, Ray's token, must be readable by this user only"
    ):
        keep_token_private({}, tmp_path)
