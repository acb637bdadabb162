"""Serve config files, and this project's parts in them, read without Ray."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve_app.api.protocol import JSON
from serve_app.system.yaml_text import NotYAMLError, load

IMPORT_PATH = "serve_app.app:build"
"""The `import_path` of this project's applications."""


class ConfigFileError(ValueError):
    """The file is not a Serve config; the message begins with its path."""


def read_file(path: Path) -> JSON:
    """Return the content of a Serve config.

    Raises:
        ConfigFileError: The file can't be read, or is not a Serve config.
    """
    try:
        content = load(path.read_text())
    except OSError as error:
        raise ConfigFileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigFileError(f"{path}: this is not UTF-8") from None
    except NotYAMLError as error:
        raise ConfigFileError(f"{path}: {error}") from None
    apps = content.get("applications") if isinstance(content, dict) else None
    if not isinstance(apps, list):
        raise ConfigFileError(f"{path}: this is not a config of Ray Serve: it has no list `applications`")
    for number, app in enumerate(apps):
        if not isinstance(app, dict):
            raise ConfigFileError(
                f"{path}: applications[{number}]: must be a mapping, not {app!r:.60}; this is not a config "
                f"of Ray Serve"
            )
    found: JSON = content
    return found


# A part of a wrong type counts as left out here; the check against the schema reports the type.


def own_applications(config: JSON) -> dict[int, JSON]:
    """Return the applications of this project, by their place in the list."""
    apps = enumerate(items(config.get("applications")))
    return {place: app for place, app in apps if mapping(app).get("import_path") == IMPORT_PATH}


def models_of(app: JSON) -> Iterator[JSON]:
    """Yield the models of an application."""
    return map(mapping, items(mapping(app.get("args")).get("models")))


def environment_of(section: Any) -> JSON:
    """Return the environment variables of `controller_options` or of an application."""
    return mapping(mapping(mapping(section).get("runtime_env")).get("env_vars"))


def mapping(value: Any) -> JSON:
    """Return a mapping as it is; an empty mapping for everything else."""
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    """Return a list as it is; an empty list for everything else."""
    return value if isinstance(value, list) else []
