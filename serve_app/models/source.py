"""The argument of `saturate serve`: a config, the demo, a directory, or a model of the hub."""

import re
from collections.abc import Callable
from pathlib import Path

from serve_app.models.errors import ModelError
from serve_app.models.hub import Hub, read_model
from serve_app.models.model_files import ModelFiles, read_folder
from serve_app.settings.fields import below_home

CONFIG_SUFFIXES = {".yaml", ".yml"}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_config(name: str) -> bool:
    """Return whether an argument names a Serve config: a file, or a name with the suffix of YAML."""
    return Path(name).suffix.lower() in CONFIG_SUFFIXES or Path(name).is_file()


def read_source(name: str, revision: str | None, hub: Callable[[], Hub]) -> ModelFiles:
    """Return the files of the model that an argument names.

    Args:
        name: A directory, or a Hugging Face id.
        revision: Branch, tag or commit of the hub; None: the main branch.
        hub: Creates the client of the hub if needed.

    Raises:
        ModelError: There is no such model, or its files are incomplete.
    """
    path = below_home(name)
    if name and path.is_dir():
        return read_folder(path)
    if HUB_ID.fullmatch(name):
        return read_model(name, revision, hub())
    raise ModelError(
        f"{name!r} is neither a config (a file), nor a directory, nor a Hugging Face id such as "
        "Qwen/Qwen2.5-7B-Instruct, nor `demo`"
    )
