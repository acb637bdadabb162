"""The command `saturate batch`: reads the options, drives the run, shows its progress and its end."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import CommandError, DiskError, DriverError
from serve_app.dataset.formats import Row, numbered
from serve_app.dataset.prompts import Prompter, read_template
from serve_app.dataset.readers import open_source
from serve_app.driver.api_run import APIRun
from serve_app.driver.chunks import chunked
from serve_app.driver.clients import Client, HandleClient, HTTPClient
from serve_app.driver.manifest import Manifest
from serve_app.driver.options import ARGUMENTS, EPILOG, GROUPS, HELP, GroupedCommand, chosen, sampling_fields
from serve_app.driver.output import Existing, Output, check_output
from serve_app.driver.progress import Progress, open_progress
from serve_app.driver.report import report, table, write_report
from serve_app.driver.run_stats import RunStats
from serve_app.driver.running import Run, call_body
from serve_app.jobs.pacing import Auto, Fixed
from serve_app.system.command_line import INTERRUPTED, USAGE, run

FAILED, SOME_FAILED, DISK_FAILED = 1, 3, 4
"""Exit codes, beside 0, `USAGE` and `INTERRUPTED`."""

SYNC_S = 1.0
"""Seconds between two syncs: the work that a machine without power may lose."""
SHOW_S = 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run(batch, arguments)


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
    except DriverError as error:
        print(f"error: {error}", file=sys.stderr)
        return DISK_FAILED if isinstance(error, DiskError) else USAGE
    except KeyboardInterrupt:
        # Before the first call, or after the last row was written.
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
        DriverError: The run can't go on; one that isn't a mistake of the command has been told.
    """
    run = APIRun.of(options, _api_key(options.api_key_env))
    try:
        batch = run.run()
    except (CommandError, DiskError):
        raise
    except DriverError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        if not options.quiet:
            there = f"batch {run.batch_id} goes on in the service; " if run.batch_id else ""
            print(f"Interrupted. {there}run the same command again to go on", file=sys.stderr)
        return INTERRUPTED
    counts = batch["request_counts"]
    if not options.quiet:
        print(f"{batch['status']}: {counts['completed']:,} of {counts['total']:,} rows are in {run.output}")
        if counts["failed"]:
            print(f"{counts['failed']:,} rows have an error, in {run.errors}")
    return SOME_FAILED if counts["failed"] else 0


class Session:
    """One run of the command.

    Args:
        options: The command line.

    Raises:
        DriverError: One of its values can't be used.
    """

    def __init__(self, options: SimpleNamespace) -> None:
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
        self._body = call_body(sampling, options.model, options.service_tier)
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
        self._output = Output(options.output, Manifest(decisive, self._source.fingerprint()), existing)
        self._progress: Progress = open_progress(options.quiet)
        self._run: Run | None = None
        self._stats = RunStats()
        self._read = 0
        self._interrupts = 0

    @property
    def waits_for_input(self) -> bool:
        """True if a thread of a run that has ended still waits for a pipe."""
        return self._source.silent and self._run is not None and self._run.reading

    def run(self) -> int:
        """Run to the end and return the exit code."""
        if (finished := self._output.finished) is not None:
            self._progress.close()
            self._say(f"{self._output.path}: complete, {finished['rows']:,} rows; nothing is left to do")
            return SOME_FAILED if finished["failed"] else 0
        failure: DriverError | None = None
        try:
            if self._output.before:
                self._progress.say(f"{self._output.before:,} rows are done already; going on from there")
            asyncio.run(self._drive())
        except DriverError as error:
            failure = error
        except asyncio.CancelledError:
            # The second interrupt.
            pass
        finally:
            self._progress.close()
        return self._end(failure)

    async def _drive(self) -> None:
        options = self._options
        automatic = options.max_concurrency == "auto"
        run = Run(
            self._client,
            self._body,
            chat=self._prompter.chat,
            concurrency=Auto(records=options.chunk_size) if automatic else Fixed(options.max_concurrency),
            retries=options.retries,
        )
        self._run, self._stats = run, run.stats
        self._catch_signals(run)
        tell = _metrics(options)
        chunks = chunked(
            self._rows(),
            self._prompter,
            options.chunk_size,
            done=self._output.done,
            id_column=options.id_column,
            limit=options.limit,
        )
        showing = asyncio.create_task(self._show(run, tell))
        syncing = asyncio.create_task(self._sync())
        writing = asyncio.create_task(self._write(run.results(chunks)))
        try:
            # A sync that fails ends the run: calls in flight could not be written.
            await asyncio.wait([syncing, writing], return_when=asyncio.FIRST_COMPLETED)
            await (writing if writing.done() else syncing)
        finally:
            for task in (writing, syncing, showing):
                task.cancel()
            await asyncio.gather(writing, syncing, showing, return_exceptions=True)
            tell(run.stats)
            await self._client.close()

    async def _write(self, results: AsyncGenerator[list[JSON], None]) -> None:
        async with aclosing(results):
            async for rows in results:
                self._output.append(rows)

    def _rows(self) -> Iterator[Row]:
        for row in numbered(self._source.values()):
            self._read = row.number + 1
            yield row

    def _total(self) -> int | None:
        """Return the number of rows of the input, as far as is known."""
        limit: int | None = self._options.limit
        share = self._source.share_read()
        if not share:
            return limit
        total = round(self._read / share)
        return total if limit is None else min(total, limit)

    async def _show(self, run: Run, tell: Callable[[RunStats], None]) -> None:
        while True:
            tell(run.stats)
            self._progress.update(run.stats, self._output.before, self._total(), _note(run))
            await asyncio.sleep(SHOW_S)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            await asyncio.to_thread(self._output.sync)

    def _catch_signals(self, run: Run) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def interrupt() -> None:
            self._interrupts += 1
            if self._interrupts == 1:
                self._progress.say(
                    f"Stopping: {run.stats.in_flight} calls in flight are finished and written; interrupt "
                    "again to stop at once"
                )
                run.stop()
            elif task:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)

    def _end(self, failure: DriverError | None) -> int:
        """Give the output its final form, write the report, and return the exit code."""
        if not failure and not self._interrupts:
            failure = _failure_of(self._output.complete)
        failure = _failure_of(self._output.close, failure)
        totals = self._output.totals
        outcome = "failed" if failure else "interrupted" if self._interrupts else "complete"
        message = str(failure or "")
        body = report(self._output.path, outcome, self._output.before, self._stats.body(), totals, message)
        if not isinstance(failure, CommandError):
            failure = _failure_of(lambda: write_report(self._report_path, body), failure)
        if failure:
            print(f"error: {failure}", file=sys.stderr)
            return _exit_code(failure)
        if not self._options.quiet:
            print(table(body))
        if self._interrupts:
            there = f"{totals['rows']:,} rows are in {self._output.path}"
            self._say(f"Interrupted. {there}; run the same command again to go on")
            return INTERRUPTED
        return SOME_FAILED if totals["failed"] else 0

    def _say(self, text: str) -> None:
        if not self._options.quiet:
            print(text, file=sys.stderr)

    def _reach(self) -> Client:
        options = self._options
        if options.app:
            return HandleClient(options.app, options.model, read_s=options.read_timeout)
        return HTTPClient(
            options.url,
            model=options.model,
            api_key=self._api_key,
            connect_s=options.connect_timeout,
            read_s=options.read_timeout,
            write_s=options.write_timeout,
            pool_s=options.pool_timeout,
        )


def _failure_of(step: Callable[[], None], before: DriverError | None = None) -> DriverError | None:
    """Do one step of a run's end, and return its error; the error of an earlier step goes before it."""
    try:
        step()
    except DriverError as error:
        return before or error
    return before


def _exit_code(failure: DriverError) -> int:
    match failure:
        case CommandError():
            return USAGE
        case DiskError():
            return DISK_FAILED
        case _:
            return FAILED


def _metrics(options: SimpleNamespace) -> Callable[[RunStats], None]:
    """Return the function that reports progress to the metrics of the cluster, if this runs in one."""
    if not options.app:
        return lambda stats: None
    # Over HTTP a driver doesn't load Ray.
    from serve_app.driver.metrics import RunMetrics

    return RunMetrics(options.model)


def _note(run: Run) -> str:
    """Return a remark for the progress line."""
    if run.stats.trouble:
        return f"trying again: {run.stats.trouble}"
    if run.asleep and run.stats.in_flight:
        return "the model is asleep; the first call wakes it, and waits until it is loaded"
    return ""


def _api_key(name: str | None) -> str | None:
    if name is None:
        return None
    if not (key := os.environ.get(name)):
        raise DriverError(f"--api-key-env {name}: no such variable in the environment")
    return key
