"""Relay messages that a test's engine sends."""

from serve_app.relay.frame import Head, pack
from serve_app.relay.usage import RequestUsage

END = pack(usage=RequestUsage())
"""The message that ends an answer and brings no more of its body."""


def complete(head: Head, body: bytes) -> bytes:
    """Return a complete answer in one message."""
    return pack(head=head, body=body, usage=RequestUsage())
