"""Values set on the command line of `saturate serve`: `--set PATH=VALUE`, or options of `vllm serve`."""

import json
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from serve_app.api.validation import is_port, suggestion
from serve_app.models import installed_vllm
from serve_app.models.errors import OptionError
from serve_app.models.installed_vllm import TEXTS, Option
from serve_app.settings.models import EngineSettings, LLMSettings
from serve_app.settings.schema import Settings, SettingsError, parse
from serve_app.settings.serve_options import DONE, MOVED, REFUSED, refusal
from serve_app.system.yaml_text import NotYAMLError, load

Part = Literal["http", "args", "model", "deployment"]

PATHS = {"host": "http.host", "port": "http.port", "served_model_name": "id"}
"""Options of `vllm serve` with one value that are settings of this service, and their paths."""

FILES = {"chat_template", "tool_parser_plugin", "reasoning_parser_plugin"}
"""Options that may name a file; paths become absolute, since the engine has another working directory."""

LARGE_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
POWERS = "kmgt"

MODEL_PATHS = set(LLMSettings.model_fields) - {"kind", "source", "simulate", "share"}
"""First keys of paths within the entry of the model."""

ARGS_PATHS = set(Settings.model_fields) - {"models", "share_groups"}
"""First keys of paths within `args`, without the models."""


@dataclass(frozen=True)
class Override:
    """A value set by the user.

    Attributes:
        part: The part of the config.
        place: Keys from that part down to the value.
        value: Any YAML value.
    """

    part: Part
    place: tuple[str, ...]
    value: Any


def engine_options(overrides: Iterable[Override]) -> dict[str, Any]:
    """Return the engine options set by the user, by their vLLM names, without null values."""
    found = {}
    for override in overrides:
        match override.place:
            case ("engine", "extra", name) | ("engine", name) if override.part == "model":
                found[name] = override.value
    return {name: value for name, value in found.items() if value is not None}


def value_at(overrides: Iterable[Override], part: Part, *place: str) -> Any:
    """Return the user's value at a place; None if it is not set."""
    return next((o.value for o in reversed(list(overrides)) if (o.part, o.place) == (part, place)), None)


def read_setting(text: str) -> Override:
    """Return the value of a `--set PATH=VALUE`.

    Args:
        text: The setting, such as "engine.max_model_len=8192". The value is YAML.

    Raises:
        OptionError: There is no such path; the message names close matches.
    """
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise OptionError(f"--set {text}: write PATH=VALUE, such as --set engine.max_model_len=8192")
    return _override(path, value, f"--set {path}")


def read_options(words: Sequence[str], own: Iterable[str]) -> tuple[list[str], list[Override]]:
    """Split words into arguments and options of `vllm serve`.

    Options have the forms of vLLM's parser: `--name value`, `--name=value`, underscores for dashes, short
    names such as `-tp`, `--no-name` for flags, `-O3`, and `--name.key value` for a part of a mapping.

    Args:
        words: Words of a command line, without the options of this command.
        own: The options of this command, for close matches.

    Raises:
        OptionError: An option doesn't exist (the message names close matches), this service has another
            setting for it, or its value is wrong.
    """
    arguments: list[str] = []
    overrides: list[Override] = []
    parts: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            arguments.append(word)
            continue
        written, equals, value = _split(word)
        head, _, key = written.partition(".")
        option, negated = _find(head, own)
        if reason := REFUSED.get(option.name):
            raise OptionError(f"{written}: {reason}")
        if option.server and option.name not in DONE and option.name not in MOVED:
            raise OptionError(f"{written}: an option of vLLM's own server, which this service doesn't have")
        if key:
            text = value if equals else _next(rest, written)
            _put(parts.setdefault(option.name, {}), key, text, written)
            continue
        if option.flag and not equals:
            overrides.append(_engine(option.name, not negated, written))
            continue
        texts = [value] if equals else _words(option, rest, written)
        overrides.append(_moved(option, texts, written) or _engine_texts(option, texts, written))
    overrides += [_engine(name, value, f"--{name.replace('_', '-')}") for name, value in parts.items()]
    return arguments, overrides


def _split(word: str) -> tuple[str, str, str]:
    """Split a word into an option's name as written, "=" if a value follows in the word, and that value."""
    if level := re.fullmatch(r"-O=?(.+)", word):
        return "--optimization-level", "=", level[1]
    return word.partition("=")


def _find(written: str, own: Iterable[str]) -> tuple[Option, bool]:
    """Return the option with a form, and whether the form negates the option.

    Raises:
        OptionError: No option has this form.
    """
    forms = _forms()
    if written == "-O":
        written = "--optimization-level"
    dashed = f"--{written[2:].replace('_', '-')}" if written.startswith("--") else written
    if option := forms.get(dashed):
        return option, False
    option = forms.get(f"--{dashed[5:]}") if dashed.startswith("--no-") else None
    if option and option.negatable:
        return option, True
    raise OptionError(f"no such option: {written}{suggestion(dashed, [*own, *forms])}")


def _forms() -> Mapping[str, Option]:
    """Return the options of `vllm serve` by their forms, such as "--tensor-parallel-size" and "-tp"."""
    return {form: option for option in _known_options().values() for form in option.strings}


def _next(rest: list[str], written: str) -> str:
    """Remove and return the value of an option, the next word."""
    if not rest or rest[0].startswith("--"):
        raise OptionError(f"{written} needs a value: {written} VALUE")
    return rest.pop(0)


def _words(option: Option, rest: list[str], written: str) -> list[str]:
    """Remove and return the words of an option's value: one word, or all up to the next option."""
    found = [_next(rest, written)]
    # vLLM reads a JSON list from one word.
    if option.several and option.name != "allowed_origins" and not found[0].startswith("["):
        while rest and not rest[0].startswith("-"):
            found.append(rest.pop(0))
    return found


def _put(section: dict[str, Any], key: str, text: str, written: str) -> None:
    """Set a part of a mapping, as `--name.key.key VALUE` does; `key+` appends to a list."""
    *outer, last = key.removesuffix("+").split(".")
    for part in outer:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise OptionError(f"{written}: {part} already has a value")
    if key.endswith("+"):
        section[last] = [*section.get(last, []), *text.split(",")]
    else:
        section[last] = _yaml(text, written)


def _moved(option: Option, texts: list[str], written: str) -> Override | None:
    """Return this service's setting for an option of vLLM's server; None if there is none."""
    match option.name:
        case "lora_modules":
            return Override("model", ("adapters",), [_adapter(text, written) for text in texts])
        case "allowed_origins":
            origins = _yaml(texts[0], written) if texts[0].startswith("[") else texts
            return Override("args", ("ingress", "allow_origins"), origins)
        case name if name in PATHS:
            if len(texts) > 1:
                raise OptionError(f"{written}: one name, not {len(texts)}: a model has one name, its `id`")
            return _override(PATHS[name], texts[0], written)
    return None


def _adapter(text: str, written: str) -> dict[str, str]:
    """Return the adapter from `NAME=PATH`, or from a JSON object with name and path."""
    try:
        fields = json.loads(text) if text.startswith("{") else None
        name, path = (str(fields["name"]), str(fields["path"])) if fields else text.split("=", 1)
    except (ValueError, KeyError, TypeError):
        raise OptionError(f"{written}: write NAME=PATH, not {text!r}") from None
    # The source is absolute, since replicas with another working directory read it.
    return {"id": name, "source": str(Path(path).absolute()) if Path(path).is_dir() else path}


def _engine_texts(option: Option, texts: list[str], written: str) -> Override:
    """Return the engine option for the words of its value."""
    if not option.several:
        return _engine(option.name, texts[0], written)
    if len(texts) == 1 and (texts[0].startswith("[") or "str" in option.types):
        return _engine(option.name, _yaml(texts[0], written), written)
    return _engine(option.name, [_yaml(text, written) for text in texts], written)


def check(overrides: Iterable[Override]) -> None:
    """Check the user's values for the model and the args, before the memory sums use them.

    Raises:
        OptionError: A value is wrong; the message has a line per mistake.
    """
    # Fields that the schema requires; a generated config has them too.
    args: dict[str, Any] = {"batches": {"folder": "~/batches"}}
    model: dict[str, Any] = {"id": "model", "source": "model"}
    for override in overrides:
        if override.part in ("model", "args"):
            section = model if override.part == "model" else args
            for key in override.place[:-1]:
                if not isinstance(section.get(key), dict):
                    section[key] = {}
                section = section[key]
            section[override.place[-1]] = override.value
    try:
        parse({"models": [model], **args})
    except SettingsError as error:
        raise OptionError(str(error)) from None


def _known_options() -> Mapping[str, Option]:
    """Return the options of `vllm serve` by name; without vLLM only the options known to this project."""
    checked = {}
    for name, field in EngineSettings.model_fields.items():
        if name != "extra":
            flag = bool in _kinds(field.annotation)
            checked[name] = Option(name, (f"--{name.replace('_', '-')}",), flag=flag, negatable=flag)
    named = {name: Option(name, (f"--{name.replace('_', '-')}",), server=True) for name in (*REFUSED, *MOVED)}
    return {**named, **checked, **installed_vllm.options()}


def _engine(name: str, value: Any, written: str) -> Override:
    """Return an engine option with a value; options unknown to `EngineSettings` go under `extra`.

    Raises:
        OptionError: The value is wrong.
    """
    option = _known_options()[name]
    if isinstance(value, str):
        value = _value_of(option, value, written)
    if name in EngineSettings.model_fields:
        return Override("model", ("engine", name), value)
    if mistake := option.mistake(value):
        raise OptionError(f"{written}: {mistake}")
    return Override("model", ("engine", "extra", name), value)


def _value_of(option: Option, text: str, written: str) -> Any:
    """Return the value of an option's text, read as by vLLM's parser."""
    field = EngineSettings.model_fields.get(option.name)
    kinds = _kinds(field.annotation) if field else []
    if option.name == "max_model_len" and text.lower() == "auto":
        return -1
    if "int" in option.types and (large := LARGE_NUMBER.fullmatch(text)):
        number, letter = large.groups()
        base = 1000 if letter.islower() else 1024
        return int(float(number) * base ** (POWERS.index(letter.lower()) + 1))
    plain = kinds == [str] if field else bool(option.types) and option.types <= TEXTS
    if plain and text not in ("", "null"):
        return str(Path(text).absolute()) if option.name in FILES and Path(text).is_file() else text
    return _yaml(text, written)


def _override(path: str, text: str, written: str) -> Override:
    part, place, root = _root(path.split("."), written)
    match place:
        case ("engine", "extra", name) | ("engine", name) if part == "model" and name != "extra":
            known = _known_options()
            if reason := refusal(name):
                raise OptionError(f"{written}: {reason}")
            if name not in known or (known[name].server and name not in DONE):
                fields = [one for one in known if refusal(one) is None]
                elsewhere = "`vllm serve --help=all` has the options of the engine"
                raise OptionError(f"{written}: there is no {name!r}{suggestion(name, fields, elsewhere)}")
            return _engine(name, text, written)
    value = _value(text, _annotation(root, place, written), written)
    if part in ("http", "deployment"):
        _check_value(root, place, value, written)
    return Override(part, place, value)


def _check_value(schema: type[BaseModel], place: Sequence[str], value: Any, written: str) -> None:
    """Check a value of Ray Serve's part of the config.

    Raises:
        OptionError: The value is wrong.
    """
    if len(place) == 1:
        field = schema.model_fields[place[0]]
        kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        try:
            TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            raise OptionError(f"{written}: {error.errors()[0]['msg']}, not {value!r}") from None
    if schema.__name__ == "HTTPOptionsSchema" and place == ("port",) and not is_port(value):
        raise OptionError(f"{written}: must be a port from 1 to 65535, not {value}")


def _root(parts: Sequence[str], written: str) -> tuple[Part, tuple[str, ...], type[BaseModel]]:
    """Return the part of the config for a path, the keys within the part, and its schema."""
    head, *rest = parts
    if head in ("http", "deployment"):
        from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema

        if not rest:
            raise OptionError(f"{written}: a section; name one of its values, as in http.port=8001")
        if head == "http":
            return "http", tuple(rest), HTTPOptionsSchema
        return "deployment", tuple(rest), DeploymentSchema
    if head in MODEL_PATHS:
        return "model", tuple(parts), LLMSettings
    if head in ARGS_PATHS:
        return "args", tuple(parts), Settings
    raise OptionError(_unknown_key(written, head, {*MODEL_PATHS, *ARGS_PATHS, "http", "deployment"}))


def _annotation(schema: type[BaseModel], place: Sequence[str], written: str) -> Any:
    """Return the type of a setting; None if any type is allowed.

    Raises:
        OptionError: There is no such setting.
    """
    kind: Any = schema
    for key in place:
        sections = [k for k in _kinds(kind) if isinstance(k, type) and issubclass(k, BaseModel)]
        if not sections:
            if dict in {typing.get_origin(k) or k for k in _kinds(kind)}:
                return None
            raise OptionError(f"{written}: there is nothing below {key!r}")
        if key not in sections[0].model_fields:
            raise OptionError(_unknown_key(written, key, sections[0].model_fields))
        kind = sections[0].model_fields[key].annotation
    return kind


def _unknown_key(written: str, key: str, names: Iterable[str]) -> str:
    return f"{written}: there is no {key!r}{suggestion(key, sorted(names), '`saturate schema` has them all')}"


def _kinds(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, without None and pydantic's metadata."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in _kinds(part)]
    return [] if annotation is type(None) else [annotation]


def _value(text: str, annotation: Any, written: str) -> Any:
    """Return the value of a text: parsed as YAML, unless only text is allowed."""
    kinds = _kinds(annotation) if annotation is not None else []
    if text and kinds == [str] and text != "null":
        return text
    return _yaml(text, written)


def _yaml(text: str, written: str) -> Any:
    """Return the value of a YAML text, which may be JSON."""
    try:
        return load(text)
    except NotYAMLError as error:
        raise OptionError(f"{written}: {text!r}: {error}") from None
