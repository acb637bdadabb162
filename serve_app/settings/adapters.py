"""Settings of LoRA adapters."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
)

from serve_app.settings.fields import ServedId, Strict
from serve_app.settings.sources import DEMO_FOLDER, DEMO_MODEL

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "https")
"""Schemes of URLs that adapters may be read from.

fsspec supports many more, through which an administrator of the models could reach hosts inside the network,
and archives that unpack into memory.
"""


def _adapter_source(source: str) -> str:
    scheme, url, _ = source.partition("://")
    if url:
        # fsspec takes `a::b` for the file b inside the file system a.
        allowed = scheme in SCHEMES and "::" not in source
        allowed = allowed or re.fullmatch(rf"{DEMO_MODEL}/[\w-]+", source) is not None
    else:
        allowed = source.startswith(("/", "~/")) or re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None
    if allowed:
        return source
    schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
    raise ValueError(
        f"must be an absolute path, a Hugging Face id such as org/name, or a URL that begins with one of "
        f"{schemes}, not {source!r}"
    )


class AdapterSettings(Strict):
    """A LoRA adapter of a language model, in PEFT's file format."""

    source: Annotated[str, AfterValidator(_adapter_source)] = Field(
        description=(
            "A directory, a Hugging Face id, a URL such as `s3://BUCKET/PATH`, or `saturate://demo/NAME`."
        )
    )
    id: ServedId | None = Field(
        default=None,
        description=(
            "The name that clients put in `model`; by default `MODEL:NAME`, with the last part of `source`."
        ),
    )

    @property
    def name(self) -> str:
        """The last part of the source, which clients may see."""
        return self.source.rstrip("/").rpartition("/")[2]

    @property
    def root(self) -> str:
        """The source as clients see it: without its directories or bucket."""
        private = "://" in self.source or self.source.startswith(("/", "~"))
        return self.name if private else self.source

    @property
    def location(self) -> str:
        """The directory, Hugging Face id or URL that the files are read from."""
        if self.source.startswith(f"{DEMO_MODEL}/"):
            return str(DEMO_FOLDER / "adapters" / self.name)
        return str(Path(self.source).expanduser()) if self.source.startswith("~/") else self.source


def adapters_by_id(model: str, adapters: Sequence[AdapterSettings]) -> dict[str, AdapterSettings]:
    """Return adapters by their ids.

    Args:
        model: Id of their base model.
        adapters: The adapters.

    Raises:
        ValueError: Two adapters have the same id.
    """
    found: dict[str, AdapterSettings] = {}
    for number, adapter in enumerate(adapters):
        id = adapter.id or f"{model}:{adapter.name}"
        if id in found:
            raise ValueError(f"adapters[{number}].id: {id!r} is used twice; each adapter needs its own")
        found[id] = adapter
    return found


MAX_SLOTS = 8
"""The largest default of `max_loras`, the adapters in one batch of an engine."""

LATER_SLOTS = 4
"""The smallest default of `max_loras` where adapters may be loaded while the service runs."""

MAX_CPU_SLOTS = 64
