"""Refusals and mistakes of clients in vLLM's log."""

import logging

from vllm.exceptions import VLLMValidationError

from serve_app.api.errors import RequestError
from serve_app.engine.vllm.client import refused
from serve_app.engine.vllm.refusal import hide_refusals


def test_vllm_logs_no_stack_trace_of_what_is_no_fault() -> None:
    logged: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record)

    handler = Kept()
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    try:
        hide_refusals()
        full = refused(RequestError(429, "rate_limit_error", "full"))
        for error in (full, VLLMValidationError("too hot"), KeyError("broken")):
            try:
                raise error
            except Exception:
                logging.getLogger("vllm.entrypoints").exception("Error in a stream.")
    finally:
        logger.removeHandler(handler)
    assert [record.exc_info[0] for record in logged if record.exc_info] == [KeyError]
