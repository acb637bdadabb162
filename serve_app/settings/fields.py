"""Field types that several sections of the settings share."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
)

Positive = Annotated[int, Field(strict=True, ge=1)]
NotNegative = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Weights = dict[str, Weight]
ModelId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]

ServedId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$")]
"""The id of a model or of an adapter."""

Group = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The name of a group of models that take turns."""

Host = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
"""The name of a host, in lower case, without scheme and port."""


def below_home(path: str) -> Path:
    """Return a path with its `~` or `~name` replaced; for an unknown user the path stays unchanged.

    `Path.expanduser` raises a RuntimeError for an unknown user, which would show as a stack trace. The
    unchanged path is reported as missing, like any other path.
    """
    return Path(os.path.expanduser(path))


def _folder(path: str) -> str:
    if not below_home(path).is_absolute():
        raise ValueError(f"must be an absolute path, or begin with ~/, not {path!r}")
    return path


def _folder_or_url(url: str) -> str:
    if "://" in url:
        return url
    return _folder(url)


def _absolute(path: str) -> str:
    if not Path(path).is_absolute():
        raise ValueError(f"must be an absolute path, on every node that runs an Ingress, not {path!r}")
    return path


File = Annotated[str, AfterValidator(_absolute)]
"""An absolute path, without ~."""

Folder = Annotated[str, AfterValidator(_folder)]
"""An absolute path; it may begin with ~."""

FolderOrURL = Annotated[str, AfterValidator(_folder_or_url)]
"""An absolute path, or a URL of fsspec."""


class Strict(BaseModel):
    """A section that refuses unknown keys, so that a typo isn't taken for a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)
