"""Manifest of an output: options and input of its run, in a file beside it. A resumed run compares them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import OutputError
from serve_app.driver.journal import write_whole

VERSION = 1


@dataclass(slots=True, frozen=True)
class Manifest:
    """The run that an output belongs to.

    Attributes:
        options: Options that determine the results.
        input: Fingerprint of the input.
        rows: Finished rows at the time of writing.
        complete: Whether all rows are finished.
        totals: Totals of the rows; None until complete.
        version: Version of the file's format.
    """

    options: JSON
    input: JSON
    rows: int = 0
    complete: bool = False
    totals: JSON | None = None
    version: int = VERSION

    def differences(self, other: "Manifest") -> list[str]:
        """Return the differences to another manifest, a line each."""
        found = []
        for name in [*self.options, *(name for name in other.options if name not in self.options)]:
            was, now = self.options.get(name), other.options.get(name)
            if was != now:
                found.append(f"{name} was {_short(was)}, is now {_short(now)}")
        if self.input != other.input:
            found.append(f"the input has changed: {_changes(self.input, other.input)}")
        return found

    def progress(self, rows: int) -> "Manifest":
        """Return the manifest with another number of finished rows."""
        return replace(self, rows=rows, complete=False, totals=None)

    def completed(self, totals: JSON) -> "Manifest":
        """Return the manifest of the finished output."""
        return replace(self, rows=totals["rows"], complete=True, totals=totals)

    def write(self, path: Path) -> None:
        """Write the manifest, atomically."""
        write_whole(path, iter([json.dumps(asdict(self), indent=1, ensure_ascii=False).encode() + b"\n"]))


def manifest_path(output: Path) -> Path:
    """Return the path of an output's manifest."""
    return output.with_name(f"{output.name}.manifest.json")


def read_manifest(path: Path) -> Manifest | None:
    """Read a manifest; None if the file doesn't exist.

    Raises:
        OutputError: The file isn't a manifest, or is one of another version.
    """
    try:
        content = json.loads(path.read_text())
        if content["version"] != VERSION:
            raise OutputError(f"{path}: written by another version of the driver; --overwrite begins anew")
        return Manifest(**content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OutputError(f"{path}: not a manifest ({error}); --overwrite begins anew") from None


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _changes(was: Mapping[str, object], now: Mapping[str, object]) -> str:
    names = [name for name in dict.fromkeys([*was, *now]) if was.get(name) != now.get(name)]
    if names == ["written"]:
        return "files of the same names and sizes were written again"
    found = [
        "other content" if name in {"content", "written"} else f"{name} {was.get(name)} -> {now.get(name)}"
        for name in names
    ]
    return ", ".join(dict.fromkeys(found))
