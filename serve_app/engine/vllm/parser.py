"""vLLM's parser of the options of `vllm serve`: it checks the options of configs, and reads command lines.

As a program it answers one question on standard input, in JSON: an import of vLLM takes seconds.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serve_app.api.protocol import JSON
from serve_app.api.validation import suggestion
from serve_app.engine.vllm.seams import make_arg_parser
from serve_app.settings.serve_options import refusal

PLAIN = (bool, int, float, str, list, dict, type(None))
"""Types of values that JSON has."""

MOST_SHOWN = 300
"""Most letters of vLLM's reason."""


class OptionParser(FlexibleArgumentParser):  # type: ignore[misc]
    """The parser of `vllm serve`; a mistake is a ValueError.

    Attributes:
        options: The options by name, with underscores.
        rest: Words of the last command line that belong to no option.
    """

    def __init__(self) -> None:
        super().__init__(add_help=False)
        make_arg_parser(self)
        self.options = {action.dest: action for action in self._actions if action.option_strings}
        self.rest: list[str] = []

    def error(self, message: str) -> NoReturn:
        """Raise a mistake as an exception."""
        # A part of a config that isn't JSON or that vLLM's own classes refuse has Python's words too.
        words = re.sub(r"cannot be converted to <function loads at \w+>", "is not JSON", message)
        raise ValueError(" ".join(words.partition(" [type=")[0].split())[:MOST_SHOWN])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line, and keep the words that belong to no option."""
        namespace, self.rest = super().parse_known_args(args, namespace)
        return namespace, []

    def values(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that options of a config have for vLLM.

        Raises:
            ValueError: vLLM has no such option, or refuses its value; the message begins with the name.
        """
        found = {name: self._value(name, value) for name, value in options.items()}
        for name, plugin, manager in (
            ("tool_call_parser", "tool_parser_plugin", ToolParserManager),
            ("reasoning_parser", "reasoning_parser_plugin", ReasoningParserManager),
        ):
            chosen, known = found.get(name), sorted(manager.list_registered())
            if chosen and chosen not in known and not found.get(plugin):
                raise ValueError(f"{name}: this vLLM has no parser {chosen!r}{suggestion(chosen, known)}")
        return found

    def _value(self, name: str, value: Any) -> Any:
        if name not in self.options:
            known = suggestion(name, (one for one in self.options if refusal(one) is None))
            raise ValueError(f"{name}: this vLLM has no such option{known}")
        words = _words(self.options[name], value)
        try:
            return getattr(self.parse_args(words), name) if words else value
        except ValueError as error:
            raise ValueError(f"{name}: {_reason(error)}") from None

    def read(self, words: Sequence[str], own: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Return the arguments of a command line, and the values of its options, as a config has them.

        The parser is used up: it has no defaults any more.

        Args:
            words: The command line, without the options of `saturate serve`.
            own: The options of `saturate serve`, for close names.

        Raises:
            ValueError: There is no such option, or vLLM refuses its value.
        """
        for action in self._actions:
            action.default = argparse.SUPPRESS
            if callable(action.type):
                action.type = _plainly(action.type)
        found = vars(self.parse_args(list(words)))
        for word in self.rest:
            if word.startswith("-"):
                form = word.partition("=")[0]
                forms = [*own, *(form for one in self.options.values() for form in one.option_strings)]
                raise ValueError(f"no such option: {form}{suggestion(form, forms)}")
        name = found.pop("model_tag", None)
        return [*([name] if name else []), *self.rest], {
            option: [dataclasses.asdict(one) for one in value] if option == "lora_modules" else value
            for option, value in found.items()
        }


def _words(action: argparse.Action, value: Any) -> list[str]:
    """Return an option of a config as words of a command line; none if no words say it."""
    form, *others = action.option_strings
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{action.dest}: must be true or false, not {value!r}")
        negations = [other for other in others if other.startswith("--no-")]
        return [form] if value else negations[:1]
    if isinstance(value, list) and action.nargs in ("+", "*"):
        return [form, *map(_text, value)] if value else []
    if isinstance(value, bool) and action.nargs == "?":
        return [form] if value else []
    return [f"{form}={_text(value)}"]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _reason(error: ValueError) -> str:
    """Return the reason of a mistake, without the forms of the option."""
    text = str(error)
    return text.partition(": ")[2] if text.startswith("argument ") else text


def _plainly(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a conversion of texts that checks with vLLM's own and returns what a config can have."""

    def plain(text: str) -> Any:
        value = convert(text)
        return value if isinstance(value, PLAIN) else json.loads(text)

    plain.__name__ = getattr(convert, "__name__", "value")
    return plain


def answer(
    words: Sequence[str] = (), own: Sequence[str] = (), configs: Sequence[Mapping[str, Any]] = ()
) -> JSON:
    """Check the options of configs, and read a command line.

    Args:
        words: The command line.
        own: The options of `saturate serve`.
        configs: Options of configs.

    Returns:
        `mistakes`, the first mistake of each config or None; `names` and `options` of the command line, or
        `error`, its first mistake.
    """
    parser = OptionParser()
    mistakes = [_mistake(parser, options) for options in configs]
    try:
        names, found = parser.read(words, own)
    except ValueError as error:
        return {"mistakes": mistakes, "error": str(error)}
    return {"mistakes": mistakes, "names": names, "options": found}


def _mistake(parser: OptionParser, options: Mapping[str, Any]) -> str | None:
    try:
        parser.values(options)
    except ValueError as error:
        return str(error)
    return None


def main() -> None:
    """Answer the question on standard input."""
    # vLLM's log goes to standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(answer(**json.load(sys.stdin)), out)
    out.flush()


if __name__ == "__main__":
    main()
