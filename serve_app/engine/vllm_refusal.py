"""The refusal of a request by the batcher, as vLLM's application knows errors.

Only files named vllm_* import vllm. The imports are those of vLLM 0.32.
"""

import logging
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError

from serve_app.api.errors import RequestError


class RefusedError(GracefulHTTPError):  # type: ignore[misc]
    """The batcher refused a request; vLLM's application ends it without a stack trace."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message, HTTPStatus(error.status))
        self.error = error


def hide_refusals() -> None:
    """Keep vLLM from logging a stack trace for each stream that the batcher refuses."""

    def shown(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], RefusedError))

    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(shown)
