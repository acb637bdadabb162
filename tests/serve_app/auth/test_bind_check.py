"""The warning about a service without API keys."""

import pytest

from serve_app.auth.bind_check import loopback_note, warning


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_on_loopback_there_is_no_warning(host: str) -> None:
    assert warning(host, keys=False) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "192.168.1.4", "llm.example.com"])
def test_on_any_other_address_there_is_a_warning_unless_there_are_keys(host: str) -> None:
    text = warning(host, keys=False)
    assert text is not None
    assert text.startswith(f"WARNING: this service listens on {host} and asks for no API key")
    assert warning(host, keys=True) is None


def test_an_unknown_address_is_taken_for_an_open_one() -> None:
    text = warning(None, keys=False)
    assert text is not None
    assert "an unknown address" in text


@pytest.mark.parametrize("usual", [None, "", "127.0.0.1"])
def test_where_services_listen_on_loopback_there_is_no_note_about_it(usual: str | None) -> None:
    assert loopback_note("127.0.0.1", usual) is None


def test_where_services_listen_on_all_interfaces_a_note_says_that_one_does_not() -> None:
    text = loopback_note("127.0.0.1", "0.0.0.0")
    assert text is not None
    assert "http_options.host: 0.0.0.0" in text
    assert loopback_note("0.0.0.0", "0.0.0.0") is None
