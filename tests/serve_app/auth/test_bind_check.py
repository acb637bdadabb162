"""When an operator is warned that strangers can call."""

import pytest

from serve_app.auth.bind_check import warning


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_on_loopback_nobody_has_to_be_asked(host: str) -> None:
    assert warning(host, keys=False) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "192.168.1.4", "llm.example.com"])
def test_on_any_other_address_it_is_said_unless_there_are_keys(host: str) -> None:
    text = warning(host, keys=False)
    assert text is not None
    assert text.startswith(f"WARNING: this service listens on {host} and asks for no API key")
    assert warning(host, keys=True) is None


def test_what_nobody_knows_may_be_open() -> None:
    text = warning(None, keys=False)
    assert text is not None
    assert "an unknown address" in text
