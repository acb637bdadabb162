"""Values that the user of `saturate serve` sets: by `--set PATH=VALUE`, or as options of `vllm serve`."""

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from serve_app.models import installed_vllm
from serve_app.models.errors import OptionError
from serve_app.settings.models import EngineSettings, LLMSettings
from serve_app.settings.schema import Settings, SettingsError, parse

Part = Literal["http", "args", "model", "deployment"]

SOMEWHERE_ELSE = {
    "model": "name the model as the argument: saturate serve MODEL",
    "api_key": "`saturate keys new` makes keys; --set access.keys_file=/etc/saturate/keys.yaml asks for them",
    "data_parallel_size": "--set deployment.num_replicas=N gives the copies of the model",
    "uds": "the service listens on --host and --port",
}
"""Options of `vllm serve` that have no place in this service, and what to use."""

PATHS = {"host": "http.host", "port": "http.port", "served_model_name": "id"}
"""Options of `vllm serve` that are no options of its engine, and the paths of the same settings."""


MODEL_PATHS = set(LLMSettings.model_fields) - {"kind", "source", "simulate", "share"}
"""Beginnings of paths below the entry of the model."""

ARGS_PATHS = set(Settings.model_fields) - {"models", "share_groups"}
"""Beginnings of paths below `args`, beside the models."""


@dataclass(frozen=True)
class Override:
    """A value that was set.

    Attributes:
        part: The part of the config.
        place: Keys from that part down to the value.
        value: Any value of YAML.
    """

    part: Part
    place: tuple[str, ...]
    value: Any


def engine_options(overrides: Iterable[Override]) -> dict[str, Any]:
    """Return the options of the engine that were set, by their vLLM names, without those that are null."""
    found = {}
    for override in overrides:
        match override.place:
            case ("engine", "extra", name) | ("engine", name) if override.part == "model":
                found[name] = override.value
    return {name: value for name, value in found.items() if value is not None}


def value_at(overrides: Iterable[Override], part: Part, *place: str) -> Any:
    """Return the value that was set at a place; None: none was."""
    return next((o.value for o in reversed(list(overrides)) if (o.part, o.place) == (part, place)), None)


def read_setting(text: str) -> Override:
    """Return the value that a `--set PATH=VALUE` sets.

    Args:
        text: Such as "engine.max_model_len=8192". The value is YAML.

    Raises:
        OptionError: There is no such path; the message names close ones.
    """
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise OptionError(f"--set {text}: write PATH=VALUE, such as --set engine.max_model_len=8192")
    return _override(path, value, f"--set {path}")


def read_options(words: Sequence[str], own: Iterable[str]) -> tuple[list[str], list[Override]]:
    """Return the arguments and the options of `vllm serve` that some words have.

    Args:
        words: Words of a command line, without the options of this command.
        own: The options of this command, for close matches.

    Raises:
        OptionError: There is no such option; the message names a close one.
    """
    options = _known_options()
    arguments, overrides = [], []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            arguments.append(word)
            continue
        written, equals, value = word.partition("=")
        name = written[2:].replace("-", "_") if written.startswith("--") else ""
        if name in SOMEWHERE_ELSE:
            raise OptionError(f"{written}: {SOMEWHERE_ELSE[name]}")
        if name.startswith("no_") and options.get(name[3:]) and not equals:
            overrides.append(_engine(name[3:], False, written))
            continue
        if name not in options and name not in PATHS:
            raise OptionError(_unknown_option(written, options, own))
        if options.get(name) and not equals:
            overrides.append(_engine(name, True, written))
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise OptionError(f"{written} needs a value: {written} VALUE")
            value = rest.pop(0)
        overrides.append(
            _override(PATHS[name], value, written) if name in PATHS else _engine(name, value, written)
        )
    return arguments, overrides


def check(overrides: Iterable[Override]) -> None:
    """Check the values of a model's settings and of the args, before they are used for sums.

    Raises:
        OptionError: A line per mistake.
    """
    # What a generated config has, and the schema requires.
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


def _known_options() -> Mapping[str, bool]:
    """Return the options of the engine by name; True: it is a flag."""
    flags = {
        name: bool in _kinds(field.annotation)
        for name, field in EngineSettings.model_fields.items()
        if name != "extra"
    }
    return {**flags, **installed_vllm.options()}


def _unknown_option(written: str, options: Iterable[str], own: Iterable[str]) -> str:
    if not written.startswith("--"):
        return f"no such option: {written}; options of `vllm serve` are taken by their long names"
    names = [*own, *(f"--{name.replace('_', '-')}" for name in (*options, *PATHS))]
    close = get_close_matches(written.replace("_", "-"), names, n=1)
    return f"no such option: {written}" + (f"; did you mean {close[0]}?" if close else "")


def _engine(name: str, value: Any, written: str) -> Override:
    """Return an option of the engine that was set; those that aren't checked here belong under `extra`."""
    if name in EngineSettings.model_fields:
        place: tuple[str, ...] = ("engine", name)
        kind = EngineSettings.model_fields[name].annotation
    else:
        place, kind = ("engine", "extra", name), None
    return Override("model", place, _value(value, kind, written) if isinstance(value, str) else value)


def _override(path: str, text: str, written: str) -> Override:
    part, place, root = _root(path.split("."), written)
    match place:
        case ("engine", name) if name not in EngineSettings.model_fields:
            if name in SOMEWHERE_ELSE:
                raise OptionError(f"{written}: {SOMEWHERE_ELSE[name]}")
            if name not in _known_options():
                raise OptionError(_unknown_key(written, name, _known_options()))
            return _engine(name, text, written)
    return Override(part, place, _value(text, _annotation(root, place, written), written))


def _root(parts: Sequence[str], written: str) -> tuple[Part, tuple[str, ...], type[BaseModel]]:
    """Return the part of the config that a path names, the place in it, and its schema."""
    head, *rest = parts
    if head in ("http", "deployment"):
        from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema

        if not rest:
            raise OptionError(f"{written}: a section; name a value in it, as in http.port=8001")
        if head == "http":
            return "http", tuple(rest), HTTPOptionsSchema
        return "deployment", tuple(rest), DeploymentSchema
    if head in MODEL_PATHS:
        return "model", tuple(parts), LLMSettings
    if head in ARGS_PATHS:
        return "args", tuple(parts), Settings
    raise OptionError(_unknown_key(written, head, {*MODEL_PATHS, *ARGS_PATHS, "http", "deployment"}))


def _annotation(schema: type[BaseModel], place: Sequence[str], written: str) -> Any:
    """Return the type of a setting; None: anything.

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
    close = get_close_matches(key, names, n=1)
    if close:
        return f"{written}: there is no {key!r}; did you mean {close[0]!r}?"
    return f"{written}: there is no {key!r}; there are {', '.join(sorted(names))}"


def _kinds(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, without None and what pydantic adds."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in _kinds(part)]
    return [] if annotation is type(None) else [annotation]


def _value(text: str, annotation: Any, written: str) -> Any:
    """Return the value of a text: YAML, but text where only text is allowed."""
    kinds = _kinds(annotation) if annotation is not None else []
    if text and kinds == [str] and text != "null":
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OptionError(f"{written}: {text!r} is not YAML: {error}") from None
