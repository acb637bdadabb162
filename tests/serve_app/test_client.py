import pytest

from serve_app.client import base_url


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://llm.example.org/", "https://llm.example.org"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("http://localhost/llm/v1/", "http://localhost/llm"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("llm.example.org", "http://llm.example.org"),
    ],
)
def test_a_slash_and_v1_at_the_end_are_left_out(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", ": must begin with http:// or https://"),
        ("ftp://localhost", "ftp://localhost: must begin with http:// or https://"),
        ("localhost:x", "http://localhost:x: is no URL: "),
        ("http://", "http://: must have a host"),
        ("http:///v1", "http:///v1: must have a host"),
        ("http://h:0", "http://h:0: must have a host, and a port from 1 to 65535 if any"),
        ("http://h:99999", "http://h:99999: is no URL: Port out of range"),
        ("http://h:-1", "http://h:-1: is no URL: "),
        ("http://h:x", "http://h:x: is no URL: "),
        ("http://[::1", "http://[::1: is no URL: "),
        ("http://h\n", "http://h\n: is no URL: "),
        ("http://h?key=1", "http://h?key=1: must have nothing behind the path"),
        ("http://h/v1#top", "http://h/v1#top: must have nothing behind the path"),
    ],
)
def test_what_can_not_be_a_service_is_told(url: str, said: str) -> None:
    with pytest.raises(ValueError) as told:  # noqa: PT011 - the whole message is compared
        base_url(url)
    assert str(told.value).startswith(said)
