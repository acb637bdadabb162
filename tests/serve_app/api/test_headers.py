"""The bearer token of a request."""

import pytest

from serve_app.api.headers import Headers, bearer_token


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ([(b"host", b"x"), (b"authorization", b"Bearer sk-ada")], b"sk-ada"),
        ([(b"authorization", b"bearer  sk-ada ")], b"sk-ada"),
        ([(b"authorization", b"Basic x"), (b"authorization", b"Bearer sk-ada")], b"sk-ada"),
        ([(b"authorization", b"Basic sk-ada")], b""),
        ([(b"authorization", b"sk-ada")], b""),
        ([(b"authorization", b"Bearer ")], b""),
        ([(b"x-api-key", b"sk-ada")], b""),
        ([], b""),
    ],
)
def test_the_token_of_the_bearer_scheme(headers: Headers, token: bytes) -> None:
    assert bearer_token(headers) == token
