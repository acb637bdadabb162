"""Validation of a batch's input file."""

from collections.abc import Collection
from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from pydantic_core import from_json

from serve_app.api.protocol import JSON
from serve_app.batches.limits import Limits
from serve_app.batches.lines import SLICE_BYTES, SLICE_LINES, Input, Line, read_lines
from serve_app.batches.plan import Plan, Planner
from serve_app.batches.tokens import bound_of

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/generate",
)
"""Routes that the rows of a batch may call."""

MODEL_OPTIONAL = "/generate"
"""The endpoint at which a body may leave the model out, if one model is served."""

MAX_ID = 512
"""Most characters of a `custom_id`."""

LISTED_MODELS = 20
"""Most models that a message names."""


class Findings(NamedTuple):
    """The result of a validation.

    Attributes:
        total: Number of rows.
        model: The model of all rows; None: they have several.
        errors: OpenAI's errors; empty: the file is valid.
        work: Bound of the work of all rows; see `tokens.bound_of`.
        plan: The plan of the rows; None: the file isn't valid.
    """

    total: int
    model: str | None
    errors: list[JSON]
    work: float = 0.0
    plan: Plan | None = None


class Sketch(NamedTuple):
    """What the first rows of a file say about all of them.

    Attributes:
        work: Bound of the work of all rows; see `tokens.bound_of`.
        model: The model of the first rows; None: they have several, or none that can be read.
    """

    work: float
    model: str | None


def batch_error(code: str, message: str, *, line: int | None = None, param: str | None = None) -> JSON:
    """Return an error in the shape of OpenAI's `errors.data`."""
    return {"code": code, "line": line, "message": message, "param": param}


def validate(path: Input, endpoint: str, models: Collection[str], limits: Limits) -> Findings:
    """Check all lines of an input file, and plan its rows.

    Of each `custom_id`, no more than a hash is kept in memory.

    Args:
        path: The file.
        endpoint: The route that its rows call.
        models: The served models.
        limits: Limits on lines and bytes.

    Raises:
        ContentLostError: The file is gone.
    """
    check = _Check(endpoint, models, limits)
    for line in read_lines(path, limits.max_line_bytes):
        check.line(line)
        if check.full:
            break
    if not check.total and not check.errors:
        check.errors.append(batch_error("empty_file", "The file has no rows"))
    model = next(iter(check.models)) if len(check.models) == 1 else None
    plan = None if check.errors else check.planner.finish()
    return Findings(check.total, model, check.errors, check.work, plan)


def sketch(path: Input, endpoint: str, size: int) -> Sketch:
    """Return what a file seems to be, in much less time than its validation takes.

    Args:
        path: The file, of which 128 lines or a MiB are read.
        endpoint: The endpoint of its batch.
        size: Bytes of the whole file.

    Raises:
        ContentLostError: The file is gone.
    """
    work, end, models = 0.0, 1, set()
    for line in islice(read_lines(path, SLICE_BYTES), SLICE_LINES):
        end = line.offset + (SLICE_BYTES if line.text is None else len(line.text)) + 1
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            body = from_json(line.text or b"")["body"]
            work += bound_of(endpoint, body, len(line.text or b""))
            models.add(body.get("model"))
        if end >= SLICE_BYTES:
            break
    model = models.pop() if len(models) == 1 else None
    return Sketch(work * size / end, model if isinstance(model, str) else None)


class _Check:
    """The lines so far."""

    def __init__(self, endpoint: str, models: Collection[str], limits: Limits) -> None:
        self.total = 0
        self.errors: list[JSON] = []
        self.models: set[str] = set()
        self.work = 0.0
        self.planner = Planner()
        self._endpoint = endpoint
        self._served = models
        self._limits = limits
        self._first_lines: dict[bytes, int] = {}

    @property
    def full(self) -> bool:
        """True when no more lines need to be looked at."""
        return len(self.errors) >= self._limits.max_errors or self.total > self._limits.max_lines

    def line(self, line: Line) -> None:
        """Look at a line, unless enough is known."""
        if self.full:
            return
        self.total += 1
        if self.total > self._limits.max_lines:
            most = self._limits.max_lines
            self._add(line, "too_many_rows", f"The file has more than {most} rows, which is the limit")
        elif line.text is None:
            most = self._limits.max_line_bytes
            self._add(line, "line_too_long", f"This line is longer than {most} bytes, which is the limit")
        else:
            try:
                row = from_json(line.text, allow_inf_nan=False)
            except ValueError as error:
                self._add(line, "invalid_json_line", f"This line is not valid JSON: {error}")
                return
            if isinstance(row, dict):
                self._row(line, row)
            else:
                self._add(line, "invalid_json_line", "This line is not a JSON object")

    def _row(self, line: Line, row: JSON) -> None:
        self._custom_id(line, row)
        if self._required(line, row, "method") and row["method"] != "POST":
            self._add(line, "invalid_method", "method must be POST", "method")
        if self._required(line, row, "url") and row["url"] != self._endpoint:
            message = f"url must be the endpoint of the batch, {self._endpoint}"
            self._add(line, "mismatched_url", message, "url")
        if not self._required(line, row, "body"):
            return
        body = row["body"]
        if not isinstance(body, dict):
            self._add(line, "invalid_type", "body must be a JSON object", "body")
            return
        self.work += bound_of(self._endpoint, body, len(line.text or b""))
        if not self.errors:
            self.planner.add(line, body)
        self._model(line, body)
        if body.get("stream"):
            message = "stream must be false: the rows of a batch are not streamed"
            self._add(line, "invalid_value", message, "body.stream")

    def _custom_id(self, line: Line, row: JSON) -> None:
        if not self._required(line, row, "custom_id"):
            return
        custom_id = row["custom_id"]
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID:
            message = f"custom_id must be a string of 1 to {MAX_ID} characters"
            self._add(line, "invalid_type", message, "custom_id")
            return
        # A hash, so that long ids take no more memory than short ones.
        digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        first = self._first_lines.setdefault(digest, line.number)
        if first != line.number:
            message = f"custom_id must be unique; line {first} has the same one"
            self._add(line, "duplicate_custom_id", message, "custom_id")

    def _model(self, line: Line, body: JSON) -> None:
        model = body.get("model")
        if model is None and self._endpoint == MODEL_OPTIONAL and len(self._served) == 1:
            return
        if not isinstance(model, str):
            self._required(line, body, "model", "body.model", str)
            return
        if model in self._served:
            self.models.add(model)
            return
        served = sorted(self._served)
        known = ", ".join(served[:LISTED_MODELS]) + (", ..." if len(served) > LISTED_MODELS else "")
        shown = model if len(model) <= MAX_ID else f"{model[:MAX_ID]}..."
        message = f"The model {shown!r} is not served here; served are: {known or 'none'}"
        self._add(line, "model_not_found", message, "body.model")

    def _required(
        self, line: Line, fields: JSON, name: str, param: str | None = None, kind: type[Any] | None = None
    ) -> bool:
        param = param or name
        if fields.get(name) is None:
            self._add(line, "missing_required_parameter", f"{param}: required, but missing", param)
            return False
        if kind is not None and not isinstance(fields[name], kind):
            self._add(line, "invalid_type", f"{param} must be a string", param)
            return False
        return True

    def _add(self, line: Line, code: str, message: str, param: str | None = None) -> None:
        if len(self.errors) < self._limits.max_errors:
            self.errors.append(batch_error(code, message, line=line.number, param=param))
