"""Refusals in vLLM's log."""

import logging

from serve_app.api.errors import RequestError
from serve_app.engine.vllm_refusal import RefusedError, hide_refusals


def test_vllm_logs_no_stack_trace_of_a_stream_that_is_refused() -> None:
    logged: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record)

    handler = Kept()
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    try:
        hide_refusals()
        for error in (RefusedError(RequestError(429, "rate_limit_error", "full")), ValueError("broken")):
            try:
                raise error
            except Exception:
                logging.getLogger("vllm.entrypoints").exception("Error in a stream.")
    finally:
        logger.removeHandler(handler)
    assert [record.exc_info[0] for record in logged if record.exc_info] == [ValueError]
