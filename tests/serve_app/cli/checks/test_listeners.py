"""Processes that listen on a port."""

import os
import socket
from pathlib import Path

import pytest

from serve_app.cli.checks.listeners import listeners


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_process_that_listens_is_found(family: socket.AddressFamily, host: str) -> None:
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no such addresses")
    with listener:
        port = listener.getsockname()[1]
        with socket.create_connection((host, port)) as client:
            # One that has only a connection there doesn't hold the port.
            assert listeners(client.getsockname()[1]) == []
            assert os.getpid() in [one.pid for one in listeners(port)]
            assert all(one.name for one in listeners(port))
    assert os.getpid() not in [one.pid for one in listeners(port)]


def test_a_program_whose_name_is_cut_inside_a_character_is_found(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    row = "0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4711 1"
    (tmp_path / "net" / "tcp").write_text(f"head\n{row}\n")
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "fd" / "3").symlink_to("socket:[4711]")
    # The kernel keeps 15 bytes of a name.
    (tmp_path / "7" / "comm").write_bytes("serveur-modèles".encode()[:12] + b"\n")
    ((pid, name),) = listeners(8000, tmp_path)
    assert pid == 7
    assert name.startswith("serveur-mod")
