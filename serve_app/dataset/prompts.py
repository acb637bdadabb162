"""Prompts from rows: texts to complete, or the messages of a chat."""

from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import MissingColumnError, RowError
from serve_app.rows.errors import RunError
from serve_app.system.distribution import extra

Prompt = str | list[JSON]
"""A text to complete, or the messages of a chat."""


class Prompter:
    """Makes prompts from rows.

    Args:
        column: Column of the prompt, unless there is a template.
        template: Jinja template over the row's columns; `row` is the whole row.
        chat: Send the prompt as a user's message, through the model's chat template.
        system: System message in front of the prompt; implies `chat`.
        messages_column: Column with a whole chat, in OpenAI's form; replaces all of the above.

    Attributes:
        chat: Whether prompts are lists of messages.

    Raises:
        RunError: The template is invalid, or the arguments contradict each other.
    """

    def __init__(
        self,
        *,
        column: str = "prompt",
        template: str | None = None,
        chat: bool = False,
        system: str | None = None,
        messages_column: str | None = None,
    ) -> None:
        if messages_column and (template or system):
            raise RunError(
                "--messages-column holds whole chats: leave --template and --system out, or put their text "
                "into the messages"
            )
        self._column = column
        self._system = system
        self._messages_column = messages_column
        self._template = None if template is None else _compile(template)
        self.chat = chat or system is not None or messages_column is not None

    def prompt(self, values: JSON) -> Prompt:
        """Return the prompt of a row.

        Raises:
            RowError: The column is missing or of a wrong type, or the template fails.
        """
        if self._messages_column:
            messages = self._value(values, self._messages_column)
            if isinstance(messages, str):
                # CSV and many Parquet files have messages as text.
                with suppress(ValueError):
                    messages = from_json(messages)
            messages = _without_nulls(messages)
            if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
                raise RowError("invalid_row", f"{self._messages_column}: must be a list of messages")
            if not messages:
                raise RowError("invalid_row", f"{self._messages_column}: no messages in it")
            if not _is_json(messages):
                raise RowError("invalid_row", f"{self._messages_column}: has values that JSON doesn't have")
            for number, message in enumerate(messages):
                if "role" not in message:
                    # As in ShareGPT's form, whose fields are from and value.
                    field = f"{self._messages_column}[{number}].role"
                    raise RowError("invalid_row", f"{field}: missing; its fields: {_columns(message)}")
            return messages
        text = self._text(values)
        if not self.chat:
            return text
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, {"role": "user", "content": text}]

    def _text(self, values: JSON) -> str:
        if self._template is None:
            text = self._value(values, self._column)
            if not isinstance(text, str):
                raise RowError("invalid_row", f"{self._column}: must be text, not {_kind(text)}")
            return text
        import jinja2

        try:
            rendered: str = self._template.render({"row": values} | values)
        except jinja2.UndefinedError as error:
            message = f"the template: {error}; there are: {_columns(values)}"
            raise MissingColumnError("template_error", message, "Correct --template") from None
        except Exception as error:
            # A template runs on arbitrary values, so it may raise anything.
            raise RowError("template_error", f"the template: {error}") from None
        return rendered

    def _value(self, values: JSON, column: str) -> Any:
        if column not in values:
            message = f"no column {column!r}; there are: {_columns(values)}"
            fix = (
                "Name the column that holds the prompt with --prompt-column, or make a prompt of several "
                "columns with --template"
            )
            raise MissingColumnError("missing_column", message, fix)
        return plain(values[column])


def plain(value: Any) -> Any:
    """Return a value with lists and numbers of Python in place of NumPy's: JSON has no values of NumPy."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [plain(part) for part in value] if isinstance(value, list) else value


def _without_nulls(value: Any) -> Any:
    """Return messages without fields that are null: Arrow gives each message the fields of all messages."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _columns(values: JSON) -> str:
    return ", ".join(map(str, values)) or "none"


def _kind(value: object) -> str:
    return "bytes that are not UTF-8" if isinstance(value, bytes) else type(value).__name__


def _shown(value: object) -> object:
    """Return a value as a template shows it."""
    if isinstance(value, bytes):
        raise ValueError("a value is not UTF-8")
    return value


def _is_json(value: object) -> bool:
    """Return whether JSON has a value: Parquet has further values, and Python reads NaN."""
    match value:
        case dict():
            return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
        case list():
            return all(map(_is_json, value))
        case float():
            return isfinite(value)
        case _:
            return value is None or isinstance(value, str | int)


def read_template(text: str) -> str:
    """Return the template of the option `--template`: the text itself, or the content of `@FILE`.

    Raises:
        RunError: The file can't be read.
    """
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"--template {text}: {reason}") from None


def _compile(template: str) -> Any:
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise RunError(f"--template needs {extra('batch')}") from None
    # By default Jinja renders an unknown column as nothing, which would hide the error.
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_shown
    )
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise RunError(f"--template, line {error.lineno}: {error.message}") from None
