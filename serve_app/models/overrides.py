"""Values set on the command line of `saturate serve`: `--set PATH=VALUE`, or options of `vllm serve`."""

import json
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from serve_app.api.protocol import JSON
from serve_app.api.validation import is_port, kinds, sections, suggestion
from serve_app.models.errors import OptionError
from serve_app.settings.models import EngineSettings, LLMSettings
from serve_app.settings.schema import Settings, SettingsError, parse
from serve_app.settings.serve_options import REFUSED, refusal
from serve_app.system.yaml_text import NotYAMLError, load

Part = Literal["http", "args", "model", "deployment"]

PATHS = {"host": "http.host", "port": "http.port", "served_model_name": "id"}
"""Options that `saturate serve` and `vllm serve` both have, and the settings in their place."""

FILES = {"chat_template", "tool_parser_plugin", "reasoning_parser_plugin"}
"""Options that may name a file; paths become absolute, since the engine has another working directory."""

PARSER = (sys.executable, "-m", "serve_app.engine.vllm.parser")
"""The program that reads options of `vllm serve` with vLLM's parser."""

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
    found = _sections(overrides)["model"].get("engine")
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if value is not None}


def _sections(overrides: Iterable[Override]) -> dict[Part, dict[str, Any]]:
    """Return the values of the user as sections of a config."""
    found: dict[Part, dict[str, Any]] = {"http": {}, "args": {}, "model": {}, "deployment": {}}
    for override in overrides:
        section = found[override.part]
        for key in override.place[:-1]:
            if not isinstance(section.get(key), dict):
                section[key] = {}
            section = section[key]
        section[override.place[-1]] = deepcopy(override.value)
    return found


def value_at(overrides: Iterable[Override], part: Part, *place: str) -> Any:
    """Return the user's value at a place; None if it is not set."""
    return next((o.value for o in reversed(list(overrides)) if (o.part, o.place) == (part, place)), None)


def read_setting(text: str, written: str = "") -> Override:
    """Return the value of a `--set PATH=VALUE`.

    Args:
        text: The setting, such as "engine.max_model_len=8192". The value is YAML.
        written: What stands in messages for the setting, if it was not `--set`.

    Raises:
        OptionError: There is no such path; the message names close matches.
    """
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise OptionError(f"--set {text}: write PATH=VALUE, such as --set engine.max_model_len=8192")
    return _override(path, value, written or f"--set {path}")


def ask_vllm(question: JSON) -> JSON:
    """Return what vLLM's parser says, in a process of its own: its import takes seconds and a gigabyte.

    Raises:
        OptionError: vLLM is not installed, or its parser has failed.
    """
    if find_spec("vllm") is None:
        raise OptionError("vLLM, which isn't installed, reads its options; use --set engine.NAME=VALUE")
    done = subprocess.run(PARSER, input=json.dumps(question), capture_output=True, text=True, check=False)
    if done.returncode:
        *_, last = done.stderr.strip().splitlines() or ["it said nothing"]
        raise OptionError(f"vLLM's parser failed: {last}")
    answer: JSON = json.loads(done.stdout)
    return answer


def read_options(
    words: Sequence[str],
    own: Iterable[str],
    overrides: Iterable[Override] = (),
    ask: Callable[[JSON], JSON] = ask_vllm,
) -> tuple[list[str], list[Override]]:
    """Split words into arguments and options of `vllm serve`, as vLLM's parser does.

    Args:
        words: Words of a command line, without the options of this command.
        own: The options of this command, for close matches.
        overrides: Other values of the user; vLLM's parser checks those that are its own.
        ask: Asks vLLM's parser, which happens only where there are such options.

    Raises:
        OptionError: An option doesn't exist (the message names close matches), this service has another
            setting for it, or its value is wrong.
    """
    for word in words:
        # Known without vLLM.
        if word.startswith("--") and (reason := REFUSED.get(_name(word))):
            raise OptionError(f"{word.partition('=')[0]}: {reason}")
    free = {k: v for k, v in engine_options(overrides).items() if k not in EngineSettings.model_fields}
    given = any(word.startswith("-") and word != "-" for word in words)
    if not given and (not free or find_spec("vllm") is None):
        return list(words), []
    answer = ask({"words": list(words), "own": list(own), "configs": [free]})
    if mistake := answer["mistakes"][0] or answer.get("error"):
        raise OptionError(mistake)
    return answer["names"], [_option(name, value) for name, value in answer["options"].items()]


def _name(word: str) -> str:
    """Return the name of an option with underscores."""
    return word.partition("=")[0].partition(".")[0].lstrip("-").replace("-", "_")


def _option(name: str, value: Any) -> Override:
    """Return the place of an option of `vllm serve`.

    Raises:
        OptionError: This service has another setting for it.
    """
    form = f"--{name.replace('_', '-')}"
    if reason := REFUSED.get(name):
        raise OptionError(f"{form}: {reason}")
    match name:
        case "lora_modules":
            return Override("model", ("adapters",), [_adapter(one["name"], one["path"]) for one in value])
        case "allowed_origins":
            return Override("args", ("ingress", "allow_origins"), value)
        case name if name in PATHS:
            raise OptionError(f"write {form}, as `saturate serve --help` has it")
        case name if name in FILES and isinstance(value, str) and os.path.isfile(value):
            value = os.path.abspath(value)
    return Override("model", ("engine", name), value)


def _adapter(name: str, path: str) -> dict[str, str]:
    # The source is absolute, since replicas with another working directory read it.
    return {"id": name, "source": os.path.abspath(path) if os.path.isdir(path) else path}


def check(overrides: Iterable[Override]) -> None:
    """Check the user's values for the model and the args, before the memory sums use them.

    Raises:
        OptionError: A value is wrong; the message has a line per mistake.
    """
    parts = _sections(overrides)
    # Fields that the schema requires; a generated config has them too.
    model = {"id": "model", "source": "model"} | parts["model"]
    batches = parts["args"].setdefault("batches", {})
    if isinstance(batches, dict):
        batches.setdefault("folder", "~/batches")
    try:
        parse({"models": [model]} | parts["args"])
    except SettingsError as error:
        raise OptionError(str(error)) from None


def _override(path: str, text: str, written: str) -> Override:
    part, place, root = _root(path.split("."), written)
    if part == "model" and place[0] == "engine" and place[1:] and (reason := refusal(place[1])):
        raise OptionError(f"{written}: {reason}")
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
        models = sections(kind)
        if not models:
            if dict in {typing.get_origin(k) or k for k in kinds(kind)}:
                return None
            raise OptionError(f"{written}: there is nothing below {key!r}")
        if key not in models[0].model_fields:
            if models[0].model_config.get("extra") == "allow":
                return None
            raise OptionError(_unknown_key(written, key, models[0].model_fields))
        kind = models[0].model_fields[key].annotation
    return kind


def _unknown_key(written: str, key: str, names: Iterable[str]) -> str:
    return f"{written}: there is no {key!r}{suggestion(key, sorted(names), '`saturate schema` has them all')}"


def _value(text: str, annotation: Any, written: str) -> Any:
    """Return the value of a text: parsed as YAML, unless only text is allowed."""
    allowed = kinds(annotation) if annotation is not None else []
    if text and allowed == [str] and text != "null":
        return text
    return _yaml(text, written)


def _yaml(text: str, written: str) -> Any:
    """Return the value of a YAML text, which may be JSON."""
    try:
        return load(text)
    except NotYAMLError as error:
        raise OptionError(f"{written}: {text!r}: {error}") from None
