"""Refusals and mistakes of clients in vLLM's log."""

import logging

import pytest
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.exception_handling import error_response
from vllm.exceptions import VLLMValidationError

from serve_app.api.errors import RequestError
from serve_app.engine.vllm.refusal import RefusedError, answer_faults, hide_refusals


def test_a_version_of_vllm_that_answers_exceptions_elsewhere_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert build_app, "the application's modules are there"
    answer_faults()
    # Again it does nothing.
    answer_faults()
    monkeypatch.setattr(error_response, "create_error_response", lambda error: error)
    with pytest.raises(RuntimeError, match="answers exceptions elsewhere: vllm"):
        answer_faults()


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
        full = RefusedError(RequestError(429, "rate_limit_error", "full"))
        for error in (full, VLLMValidationError("too hot"), KeyError("broken")):
            try:
                raise error
            except Exception:
                logging.getLogger("vllm.entrypoints").exception("Error in a stream.")
    finally:
        logger.removeHandler(handler)
    assert [record.exc_info[0] for record in logged if record.exc_info] == [KeyError]
