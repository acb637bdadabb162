"""Requests and responses of `/generate` and `/process`, over HTTP and over the handle."""

import json
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from serve_app.api.errors import RequestError
from serve_app.api.scheduling import SchedulingFields
from serve_app.api.validation import field_path, suggestion

JSON = dict[str, Any]
BodyT = TypeVar("BodyT", bound=BaseModel)

MAX_NAME = 1_000
"""Maximum characters of the path of a field that errors quote."""

MAX_SALT = 256
"""Maximum characters of a `cache_salt`: it is in the hash of a prompt's first block."""

MOST_TEXT = 16_384
"""Maximum bytes of JSON text of `stop`, `bad_words` or `vllm_xargs`: vLLM looks for each stop string at each
token, and tokenizes bad words on the event loop."""

LISTED = "GET /docs lists the fields of each route"

Probability = Annotated[float, Field(strict=True, gt=0, le=1)]
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2)]
Flag = Annotated[bool, Field(strict=True)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _bounded(texts: list[str]) -> list[str]:
    if (size := len(msgspec.json.encode(texts))) > MOST_TEXT:
        raise ValueError(f"has {size} bytes; at most {MOST_TEXT} are allowed")
    return texts


class SamplingFields(BaseModel):
    """Sampling parameters; a field left out has the config's value, or else vLLM's default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=2)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[list[str], Field(max_length=64), BeforeValidator(_as_list), AfterValidator(_bounded)] | None
    ) = None
    stop_token_ids: Annotated[list[Annotated[int, Field(strict=True)]], Field(max_length=64)] | None = None
    ignore_eos: Flag | None = None

    def sampling(self) -> JSON:
        """Return the fields that were given, by their vLLM names."""
        return self.model_dump(include=set(SamplingFields.model_fields), exclude_none=True)


class GenerateRequest(SamplingFields, SchedulingFields):
    """The body of `POST /generate` and the argument of the handle's `generate`.

    Attributes:
        prompts: Texts to complete; at least one.
        messages: Chats to answer, in place of `prompts`: each a list of OpenAI's messages, with text only,
            which pass through the model's chat template. Chats have the limits of prompts.
        task_id: Returned unchanged, so that a client can tell its calls apart.
        model: Id of the model; optional where only one model is served.
        cache_salt: Prompts share the prefix cache only with prompts of the same salt.
        details: Also return the finish reason and the token counts of each prompt.
        partial: Return a prompt that can't be served as an entry of `errors`, instead of failing
            the whole call.
    """

    prompts: Annotated[list[str], Field(fail_fast=True)] | None = None
    messages: Annotated[list[Annotated[list[JSON], Field(fail_fast=True)]], Field(fail_fast=True)] | None = (
        None
    )
    task_id: str | None = None
    model: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    details: Flag = False
    partial: Flag = False


class Detail(BaseModel):
    """Finish reason and token counts of one prompt."""

    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


class PromptError(BaseModel):
    """The error of one prompt or record of a `partial` call."""

    index: int
    type: str
    message: str


class Usage(BaseModel):
    """Tokens of the whole call."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class GenerateResponse(BaseModel):
    """The answer of `/generate`: one result per prompt, in the order of the prompts.

    Attributes:
        results: Generated texts; null for a prompt that is in `errors`.
        task_id: The request's `task_id`.
        usage: Tokens of the whole call.
        details: With `details`, one entry per prompt; null for a prompt that is in `errors`.
        errors: With `partial`, the prompts that failed.
    """

    results: list[str | None]
    task_id: str | None
    usage: Usage
    details: list[Detail | None] | None = None
    errors: list[PromptError] | None = None


class ProcessRequest(SchedulingFields):
    """The body of `POST /process` and the argument of the handle's `process`.

    Attributes:
        records: Separate inputs of the model's function: any JSON; at least one.
        task_id: Returned unchanged, so that a client can tell its calls apart.
        model: Id of the model; optional where only one function is served.
        partial: Return a record that can't be served as an entry of `errors`, instead of failing the
            whole call.
    """

    records: list[Any]
    task_id: str | None = None
    model: str | None = None
    partial: Flag = False


def parse_generate(body: bytes | JSON, *, max_prompts: int) -> GenerateRequest:
    """Check the body of a `/generate` call.

    Args:
        body: JSON text, or the parsed object.
        max_prompts: Maximum prompts that one call may carry.

    Raises:
        RequestError: 400 that names the field and the expected form.
    """
    request = parse_body(GenerateRequest, body)
    if request.prompts is not None and request.messages is not None:
        message = "messages: prompts are given too; send one of the two"
        raise RequestError(400, "invalid_request_error", message, param="messages")
    if request.messages is not None:
        check_count("messages", len(request.messages), max_prompts)
    elif request.prompts is not None:
        check_count("prompts", len(request.prompts), max_prompts)
    else:
        message = "prompts: required, but missing"
        raise RequestError(400, "invalid_request_error", message, param="prompts")
    return request


def parse_process(body: bytes | JSON, *, max_records: int) -> ProcessRequest:
    """Check the body of a `/process` call.

    Args:
        body: JSON text, or the parsed object.
        max_records: Maximum records that one call may carry.

    Raises:
        RequestError: 400 that names the field and the expected form.
    """
    request = parse_body(ProcessRequest, body)
    check_count("records", len(request.records), max_records)
    return request


def check_count(field: str, count: int, most: int) -> None:
    """Raise a RequestError if the list in `field` is empty or longer than `most`."""
    if not count:
        raise RequestError(400, "invalid_request_error", f"No {field} provided", param=field)
    if count > most:
        message = (
            f"{field}: {count} {field} in one call, at most {most} are allowed; send them in several calls"
        )
        raise RequestError(400, "invalid_request_error", message, param=field)


def parse_body(kind: type[BodyT], body: bytes | JSON) -> BodyT:
    """Check a body against a pydantic model. A field that is null counts as not set.

    Args:
        kind: The model.
        body: JSON text, or the parsed object.

    Raises:
        RequestError: 400 that names the field and the mistake.
    """
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if value is not None}
    try:
        if isinstance(body, bytes):
            return kind.model_validate_json(without_nulls(body))
        return kind.model_validate(body)
    except ValidationError as error:
        raise _bad_field(error, list(kind.model_fields)) from None


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def without_nulls(body: bytes) -> bytes:
    """Return a JSON object without its fields that are null; any other text stays as it is."""
    if b"null" not in body:
        return body
    try:
        content = _OBJECT.decode(body)
        kept = {name: text for name, text in content.items() if len(text) != 4 or bytes(text) != b"null"}
        return body if len(kept) == len(content) else msgspec.json.encode(kept)
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        # A value that strict JSON doesn't have, such as NaN.
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(parsed, dict) or None not in parsed.values():
        return body
    return json.dumps({name: value for name, value in parsed.items() if value is not None}).encode()


def _bad_field(error: ValidationError, fields: list[str]) -> RequestError:
    item = error.errors(include_url=False)[0]
    if item["type"] == "json_invalid":
        return RequestError(
            400, "invalid_request_error", f"The body is not valid JSON: {item['ctx']['error']}"
        )
    # pydantic appends the branch of a union to the field, which means nothing to a client.
    param = field_path(
        part for at, part in enumerate(item["loc"]) if isinstance(part, int) or part in fields or not at
    )
    if len(param) > MAX_NAME:
        # The name of an unknown field may be as long as the body.
        param = f"{param[:MAX_NAME]}…"
    if not item["loc"]:
        return RequestError(400, "invalid_request_error", "The body must be a JSON object")
    match item["type"]:
        case "extra_forbidden":
            *parents, name = item["loc"]
            known = f"; {LISTED}" if parents else suggestion(str(name), fields, LISTED, "allowed are")
            message = f"{param}: unknown field{known}"
        case "missing":
            message = f"{param}: required, but missing"
        case "value_error":
            message = f"{param}: {item['ctx']['error']}"
        case _:
            message = f"{param}: {item['msg']}"
    return RequestError(400, "invalid_request_error", message, param=param)
