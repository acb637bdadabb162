"""The usage of an answer, packed behind its last byte."""

import pytest

from serve_app.relay.usage import MARK, MAX_PARTS, PromptUsage, RequestUsage, split


def test_usage_adds_up_and_is_bounded() -> None:
    usage = RequestUsage()
    assert usage.pack() == b""
    for n in range(100):
        usage.add(PromptUsage(n, n + 0.25 * (n % 2), n + 3.0, 10, 1))
    body, read = split(b"body" + usage.pack())
    assert body == b"body"
    assert (read.prompt_tokens, read.output_tokens, read.wait_s, read.engine_s) == (1000, 100, 0.25, 102.0)
    assert len(usage.parts) == MAX_PARTS
    # No text can end like that.
    with pytest.raises(UnicodeDecodeError):
        MARK.decode()
