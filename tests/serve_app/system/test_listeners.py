"""Processes that listen on a port."""

import os
import socket

import pytest

from serve_app.system.processes import listeners


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
