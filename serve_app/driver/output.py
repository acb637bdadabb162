"""Output of a run: a journal, which is the JSONL output or becomes the Parquet output."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import OutputError
from serve_app.driver.journal import Journal
from serve_app.driver.manifest import Manifest, manifest_path, read_manifest
from serve_app.driver.parquet import write_parquet
from serve_app.driver.spans import Spans

Existing = Literal["same", "resume", "overwrite"]
"""Handling of existing rows: go on if options and input are the same, go on anyway, or begin anew."""


class Output:
    """The output of a run, new or begun by an earlier run.

    Args:
        path: A `.jsonl` or `.parquet` file.
        manifest: Options and input of this run.
        existing: Handling of existing rows.

    Attributes:
        before: Number of rows of earlier runs.
        torn: Whether the last run ended within a line, which was cut off.
        finished: Totals of an output that is complete; None if rows are left to do.

    Raises:
        OutputError: The output is in use, belongs to another run, or can't be written.
    """

    def __init__(self, path: Path, manifest: Manifest, existing: Existing = "same") -> None:
        check_output(path)
        self.path = path
        self._manifest = manifest
        self._manifest_path = manifest_path(path)
        self._parquet = path.suffix == ".parquet"
        journal_path = path.with_name(f"{path.name}.journal.jsonl") if self._parquet else path
        if existing == "overwrite":
            self._remove(journal_path)
        found = read_manifest(self._manifest_path)
        if found and found.differences(manifest) and not self._rows_there(found, journal_path):
            # The first command of a user may have a mistake. There is nothing to protect.
            self._remove(journal_path)
            found = None
        self._check(found, journal_path, existing)
        self.finished = found.totals if found and found.complete and path.exists() else None
        if self.finished is not None and found and found.differences(manifest):
            if self._parquet:
                raise OutputError(f"{path}: complete, nothing can be added to it; --overwrite begins anew")
            self.finished = None
        self._journal: Journal | None = None
        self._closed = False
        self.before, self.torn = 0, False
        if self.finished is None:
            self._journal = journal = Journal(journal_path)
            self.before, self.torn = len(journal.done), journal.torn
            manifest.progress(self.before).write(self._manifest_path)

    @property
    def done(self) -> Spans:
        """Numbers of the rows in the output, as a copy."""
        return self._open.done.copy()

    @property
    def totals(self) -> JSON:
        """Totals of all rows, those of earlier runs included; also of an output that is closed."""
        if self._journal is None:
            raise AssertionError("the output was complete before")
        return self._journal.totals.body()

    def append(self, rows: Sequence[JSON]) -> None:
        """Add finished rows."""
        self._open.append(rows)

    def sync(self) -> None:
        """Flush added rows to the disk."""
        self._open.sync()

    def complete(self) -> None:
        """Bring the output into its final form: rows in the order of the input.

        Raises:
            OutputError: The disk is full, or fails. The output is still open.
        """
        journal = self._open
        if self._parquet:
            journal.sync()
            write_parquet(self.path, _lines(journal.pieces()))
        else:
            journal.put_in_order()
        self._manifest.completed(journal.totals.body()).write(self._manifest_path)
        self._closed = True
        journal.close()
        if self._parquet:
            journal.path.unlink()

    def close(self) -> None:
        """Close an incomplete output, so that another run can go on from it; again: do nothing.

        Raises:
            OutputError: The disk is full, or fails.
        """
        if self._journal is None or self._closed:
            return
        self._closed = True
        self._journal.close()
        self._manifest.progress(len(self._journal.done)).write(self._manifest_path)

    @property
    def _open(self) -> Journal:
        if self._journal is None or self._closed:
            raise AssertionError("the output is closed")
        return self._journal

    def _rows_there(self, found: Manifest, journal: Path) -> int:
        """Return the number of rows of an earlier run."""
        if found.complete:
            return found.rows if self.path.exists() else 0
        if not journal.exists():
            return 0
        with journal.open("rb") as file:
            return sum(line.endswith(b"\n") for line in file)

    def _remove(self, journal: Path) -> None:
        if journal.exists():
            # A driver that has it open would go on writing.
            try:
                Journal(journal).close()
            except OutputError as error:
                if "another driver" in str(error):
                    raise
        for path in (self._manifest_path, journal, self.path):
            path.unlink(missing_ok=True)

    def _check(self, found: Manifest | None, journal: Path, existing: Existing) -> None:
        there = self.path if self.path.exists() else journal
        if found is None:
            if there.exists() and there.stat().st_size:
                raise OutputError(
                    f"{there} exists, and no manifest beside it says that a driver wrote it; name another "
                    "output, or replace it with --overwrite"
                )
            return
        differences = found.differences(self._manifest)
        if differences and existing != "resume":
            raise OutputError(
                f"{self.path} has {self._rows_there(found, journal):,} rows of another run:\n  "
                + "\n  ".join(differences)
                + "\nName another output, begin anew with --overwrite, or keep these rows and go on "
                "with --resume"
            )


def check_output(path: Path) -> None:
    """Raise an OutputError if nothing can be written there."""
    if "://" in str(path) or str(path).startswith(("s3:/", "gs:/")):
        raise OutputError(f"{path}: the output has to be a local file; copy it when the run has ended")
    if path.suffix not in {".jsonl", ".parquet"}:
        raise OutputError(f"{path}: the output's name must end in .jsonl or .parquet")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}")


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
