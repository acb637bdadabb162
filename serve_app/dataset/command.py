"""The command `saturate batch`: reads the options, drives the run, shows its progress and its end."""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from serve_app.dataset.api import APIRun, errors_of, timeouts
from serve_app.dataset.errors import CommandError, DiskError
from serve_app.dataset.formats import CorruptError
from serve_app.dataset.options import (
    ARGUMENTS,
    EPILOG,
    GROUPS,
    HELP,
    GroupedCommand,
    chosen,
    sampling_fields,
)
from serve_app.dataset.progress import open_progress, run_shown
from serve_app.dataset.prompts import Prompter, read_template
from serve_app.dataset.readers import open_source
from serve_app.dataset.report import report, table, write_report
from serve_app.dataset.run import Drive, call_fields
from serve_app.dataset.stats import RowService, RunStats
from serve_app.rows.errors import RunError
from serve_app.rows.http import HTTPClient
from serve_app.system.command_line import INTERRUPTED, USAGE
from serve_app.telemetry import catalogue

if TYPE_CHECKING:
    from serve_app.dataset.output import Existing
    from serve_app.telemetry.meters import Meters

FAILED, SOME_FAILED, DISK_FAILED = 1, 3, 4
"""Exit codes, beside 0, `USAGE` and `INTERRUPTED`."""

SHOW_S = 0.5
"""Seconds between two looks at the progress."""


@click.command(
    cls=GroupedCommand,
    params=ARGUMENTS,
    groups=GROUPS,
    help=HELP,
    epilog=EPILOG,
    context_settings={"max_content_width": 100},
)
def batch(**values: Any) -> int:
    """Drive one run; return its exit code."""
    session = None
    try:
        options = chosen(values)
        if options.api:
            return run_api(options)
        session = Session(options)
        code = session.run()
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return DISK_FAILED if isinstance(error, DiskError) else USAGE
    except KeyboardInterrupt:
        # Interrupted before the first call, or after the last row was written.
        code = INTERRUPTED
    if code == INTERRUPTED or (session and session.waits_for_input):
        sys.stdout.flush()
        sys.stderr.flush()
        # A thread may wait for a pipe that stays silent, and Python would wait for the thread.
        os._exit(code)
    return code


def run_api(options: SimpleNamespace) -> int:
    """Run a file through the batch API of a service; return the exit code.

    Raises:
        RunError: The command is wrong, or the disk fails; other errors are printed here.
    """
    run = APIRun.of(options, _api_key(options.api_key_env))
    try:
        batch = run.run()
    except (CommandError, DiskError):
        raise
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        if not options.quiet:
            there = f"batch {run.batch_id} continues in the service; " if run.batch_id else ""
            print(f"Interrupted. {there}run the same command again to continue", file=sys.stderr)
        return INTERRUPTED
    counts = batch["request_counts"]
    if not options.quiet:
        place = f"are in {run.output}" if batch["output_file_id"] else "have an answer; there is no output"
        print(f"{batch['status']}: {counts['completed']:,} of {counts['total']:,} rows {place}")
        if counts["failed"]:
            print(f"{counts['failed']:,} rows have an error, in {run.errors}")
    for line in errors_of(batch):
        print(line, file=sys.stderr)
    return SOME_FAILED if counts["failed"] or batch["status"] != "completed" else 0


class Session:
    """One run of the command.

    Args:
        options: The command line.

    Raises:
        RunError: An option has an invalid value.
    """

    def __init__(self, options: SimpleNamespace) -> None:
        # Imported only here: a run with --api needs no database.
        from serve_app.dataset.output import Output, check_output

        self._options = options
        template = None if options.template is None else read_template(options.template)
        self._prompter = Prompter(
            column=options.prompt_column,
            template=template,
            chat=options.chat,
            system=options.system,
            messages_column=options.messages_column,
        )
        sampling = sampling_fields(options)
        self._fields = call_fields(sampling, options.model)
        check_output(options.output)
        self._report_path: Path = options.report or options.output.with_name(
            f"{options.output.name}.report.json"
        )
        self._api_key = _api_key(options.api_key_env)
        self._source = open_source(options.input, options.input_format, options.separator)
        decisive = {
            "--model": options.model,
            "--prompt-column": None if template or options.messages_column else options.prompt_column,
            "--template": template,
            "--chat": self._prompter.chat,
            "--system": options.system,
            "--messages-column": options.messages_column,
            "--id-column": options.id_column,
            "--limit": options.limit,
            "--separator": options.separator,
            **{f"--{name.replace('_', '-')}": value for name, value in sampling.items()},
        }
        self._client = self._reach()
        existing: Existing = "overwrite" if options.overwrite else "resume" if options.resume else "same"
        self._output = Output(options.output, decisive, self._source.fingerprint(), existing)
        self._progress = open_progress(options.quiet)
        self._drive: Drive | None = None
        self._interrupts = 0

    @property
    def waits_for_input(self) -> bool:
        """True if a thread of a run that has ended still waits for a pipe."""
        return self._source.silent and self._drive is not None and self._drive.silent

    def run(self) -> int:
        """Run to the end and return the exit code."""
        if (finished := self._output.finished) is not None:
            self._output.close()
            self._progress.end()
            self._say(f"{self._output.path}: complete, {finished['rows']:,} rows; nothing is left to do")
            return SOME_FAILED if finished["failed"] else 0
        failure: RunError | None = None
        try:
            if self._output.before:
                self._progress.say(f"{self._output.before:,} rows are done already; continuing from there")
            asyncio.run(self._run())
        except RunError as error:
            failure = error
        except asyncio.CancelledError:
            # The second interrupt.
            pass
        finally:
            self._progress.end()
        return self._end(failure)

    async def _run(self) -> None:
        options = self._options
        self._drive = drive = Drive(
            self._output.numbered(self._source.files()),
            self._prompter,
            self._client,
            self._fields,
            self._output.record,
            tier=options.service_tier,
            done=self._output.done,
            before=self._output.before,
            concurrency=options.concurrency,
            retries=options.retries,
            id_column=options.id_column,
            limit=options.limit,
            silent=self._source.silent,
        )
        self._catch_signals(drive)
        tell = _metrics(options)
        showing = asyncio.create_task(self._show(drive, tell))
        try:
            await drive.run()
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
            tell(drive.stats)
            await self._client.close()

    def _total(self, drive: Drive) -> int | None:
        """Return the number of rows of the input, perhaps an estimate; None: unknown."""
        limit: int | None = self._options.limit
        share = self._source.share_read()
        if not share:
            return limit
        total = round(drive.read / share)
        return total if limit is None else min(total, limit)

    async def _show(self, drive: Drive, tell: Callable[[RunStats], None]) -> None:
        while True:
            tell(drive.stats)
            total = self._total(drive)
            self._progress.show(*run_shown(drive.stats, self._output.before, total, _note(drive)))
            await asyncio.sleep(SHOW_S)

    def _catch_signals(self, drive: Drive) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def interrupt() -> None:
            self._interrupts += 1
            if self._interrupts == 1:
                self._progress.say(
                    f"Stopping: {drive.stats.in_flight} calls in flight are finished and written; interrupt "
                    "again to stop at once"
                )
                drive.stop()
            elif task:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)

    def _end(self, failure: RunError | None) -> int:
        """Give the output its final form, write the report, and return the exit code."""
        if not failure and not self._interrupts:
            failure = _failure_of(self._output.complete)
        stats = self._drive.stats if self._drive else RunStats()
        outcome = "failed" if failure else "interrupted" if self._interrupts else "complete"
        totals = self._output.totals()
        self._output.close()
        message = str(failure or "")
        body = report(self._output.path, outcome, self._output.before, stats.body(), totals, message)
        if not isinstance(failure, CommandError):
            failure = _failure_of(lambda: write_report(self._report_path, body), failure)
        if failure:
            print(f"error: {failure}", file=sys.stderr)
            if isinstance(failure, CorruptError) and totals["rows"]:
                self._say(f"{totals['rows']:,} rows are in {self._output.path}: mend the file, then --resume")
            return _exit_code(failure)
        if not self._options.quiet:
            print(table(body))
        if self._interrupts:
            there = f"{totals['rows']:,} rows are in {self._output.path}"
            self._say(f"Interrupted. {there}; run the same command again to continue")
            return INTERRUPTED
        return SOME_FAILED if totals["failed"] else 0

    def _say(self, text: str) -> None:
        if not self._options.quiet:
            print(text, file=sys.stderr)

    def _reach(self) -> RowService:
        options = self._options
        if options.app:
            # Over HTTP a run doesn't load Ray.
            from serve_app.rows.handle import HandleClient

            return HandleClient(options.app, options.model)
        _allow_connections()
        return HTTPClient(
            options.url,
            model=options.model,
            api_key=self._api_key,
            timeout=timeouts(options),
        )


def _allow_connections() -> None:
    """Raise the limit of open files as far as allowed: each row in flight has a connection."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _failure_of(step: Callable[[], None], before: RunError | None = None) -> RunError | None:
    """Do one step of a run's end, and return its error, or the error of an earlier step."""
    try:
        step()
    except RunError as error:
        return before or error
    return before


def _exit_code(failure: RunError) -> int:
    match failure:
        case CommandError():
            return USAGE
        case DiskError():
            return DISK_FAILED
        case _:
            return FAILED


def _metrics(options: SimpleNamespace) -> Callable[[RunStats], None]:
    """Return the function that reports progress to the metrics of the cluster, if the run is in a cluster."""
    if not options.app:
        return lambda stats: None
    # Over HTTP a run doesn't load Ray.
    from serve_app.telemetry.meters import Meters

    return RunMetrics(options.model, Meters(catalogue.DRIVER))


class RunMetrics:
    """Records the statistics of a run as metrics.

    Args:
        model: Id of the model, for labels.
        meters: Instruments of `catalogue.DRIVER`.
    """

    def __init__(self, model: str, meters: "Meters") -> None:
        self._model = model
        self._meters = meters

    def __call__(self, stats: RunStats) -> None:
        """Record the statistics."""
        failed = stats.failed.total()
        count = self._meters.count
        count(catalogue.DRIVER_ROWS, stats.rows - failed, self._model, "done")
        count(catalogue.DRIVER_ROWS, failed, self._model, "failed")
        count(catalogue.DRIVER_TOKENS, stats.prompt_tokens + stats.completion_tokens, self._model)
        count(catalogue.DRIVER_RETRIES, stats.retries, self._model)
        self._meters.record(catalogue.DRIVER_CALLS, stats.in_flight, self._model)


def _note(drive: Drive) -> str:
    """Return a remark for the progress line."""
    if drive.stats.trouble:
        return f"trying again: {drive.stats.trouble}"
    if drive.asleep and drive.stats.in_flight:
        return "the model is asleep; the first call wakes it, and waits until it is loaded"
    return ""


def _api_key(name: str | None) -> str | None:
    if name is None:
        return None
    if not (key := os.environ.get(name)):
        raise RunError(f"--api-key-env {name}: no such variable in the environment")
    return key
