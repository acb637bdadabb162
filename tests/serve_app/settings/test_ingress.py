import pytest

from serve_app.api.protocol import JSON
from serve_app.settings.schema import parse
from tests.serve_app.settings.helpers import mistakes, one


@pytest.mark.parametrize(
    ("access", "words"),
    [
        ({}, "args.access: give keys_file or keys_env"),
        ({"keys_file": "keys.yaml"}, "args.access.keys_file: must be an absolute path"),
        ({"keys_env": "no name"}, "args.access.keys_env: "),
        (
            {"keys_env": "KEYS", "trusted_proxies": ["127.0.0.0/8", "10.0.0.1/8"]},
            "args.access.trusted_proxies[1]: '10.0.0.1/8' has bits after its prefix",
        ),
        ({"keys_env": "KEYS", "trusted_proxies": ["haproxy"]}, "args.access.trusted_proxies[0]: must be an"),
        ({"keys_env": "KEYS", "trusted_proxies": "127.0.0.1"}, "args.access.trusted_proxies: "),
    ],
)
def test_access_says_where_the_keys_are(access: JSON, words: str) -> None:
    (line,) = mistakes(one() | {"access": access})
    assert line.startswith(words)


def test_without_access_there_are_no_keys() -> None:
    assert parse(one()).access is None


def test_one_body_has_to_fit_into_the_bytes_in_flight() -> None:
    assert parse(one()).ingress.bytes_in_flight == 256 * 1024 * 1024
    limits = {"max_body_bytes": 100, "max_bytes_in_flight": 200}
    assert parse(one() | {"ingress": limits}).ingress.bytes_in_flight == 200
    (line,) = mistakes(one() | {"ingress": limits | {"max_bytes_in_flight": 199}})
    assert line == ("args.ingress: max_bytes_in_flight: must be at least twice max_body_bytes, which is 100")
