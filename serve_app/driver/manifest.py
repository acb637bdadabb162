"""What an output was made from, in a file beside it, so that a run goes on only where it may."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from serve_app.api.protocol import JSON
from serve_app.driver.errors import OutputError
from serve_app.driver.journal import write_whole

VERSION = 1


@dataclass(slots=True, frozen=True)
class Manifest:
    """The run that an output belongs to.

    Attributes:
        options: What decides over the results.
        input: The input's fingerprint.
        rows: Rows done, when last written.
        complete: Whether the run has ended with every row done.
        totals: What the rows add up to, once complete.
        version: Of this file's form.
    """

    options: JSON
    input: JSON
    rows: int = 0
    complete: bool = False
    totals: JSON | None = None
    version: int = VERSION

    def differences(self, other: "Manifest") -> list[str]:
        """Return what another manifest says differently, a line each."""
        found = []
        for name in [*self.options, *(name for name in other.options if name not in self.options)]:
            was, now = self.options.get(name), other.options.get(name)
            if was != now:
                found.append(f"{name} was {_short(was)}, is now {_short(now)}")
        if self.input != other.input:
            found.append(f"the input has changed: {_changes(self.input, other.input)}")
        return found

    def progress(self, rows: int) -> "Manifest":
        """Return the manifest with another number of rows done."""
        return replace(self, rows=rows, complete=False, totals=None)

    def completed(self, totals: JSON) -> "Manifest":
        """Return the manifest of the finished output."""
        return replace(self, rows=totals["rows"], complete=True, totals=totals)

    def write(self, path: Path) -> None:
        """Write it, wholly or not at all."""
        write_whole(path, iter([json.dumps(asdict(self), indent=1, ensure_ascii=False).encode() + b"\n"]))


def manifest_path(output: Path) -> Path:
    """Return where an output's manifest is."""
    return output.with_name(f"{output.name}.manifest.json")


def read_manifest(path: Path) -> Manifest | None:
    """Read a manifest; None where there is none.

    Raises:
        OutputError: It is none, or a later version's.
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
    found = [
        "other content" if name in {"content", "names"} else f"{name} {was.get(name)} -> {now.get(name)}"
        for name in dict.fromkeys([*was, *now])
        if was.get(name) != now.get(name)
    ]
    return ", ".join(dict.fromkeys(found))
