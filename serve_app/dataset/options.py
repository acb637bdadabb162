"""The options of `saturate batch`."""

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import click
from pydantic import ValidationError

from serve_app.api.protocol import JSON, SamplingFields
from serve_app.api.scheduling import TIER_PRIORITY
from serve_app.rows.errors import RunError
from serve_app.system.command_line import Number

DEFAULT_URL = "http://127.0.0.1:8000"

DEFAULT_WINDOW = "24h"

HELP = """\
Send every row of a dataset through a service, and write one row for each: its result or its error.

No result is lost, and no row with a result is sent again: after Ctrl-C, a crash or a power cut, the same
command continues with the other rows.
"""

EPILOG = """\
\b
Input:
  prompts.jsonl, data.csv, data.parquet   a file: .jsonl, .json (lines or an array), .csv, .tsv,
                                          .parquet; all but Parquet also as .gz, .bz2, .xz, .zst, .lz4
  data/                                   a folder and all folders below it
  'data/*.jsonl', 'data/**/*.parquet'     a pattern; quote it
  s3://bucket/data/, gs://bucket/x.jsonl  the same in object storage
  hf://openai/gsm8k#main/test             a Hugging Face dataset: OWNER/NAME#CONFIG/SPLIT
  hf://datasets/me/mine/data/*.jsonl      files of a dataset
  -, or a named pipe                      standard input; as in <(zcat rows.gz)

\b
Output:
  OUTPUT                 one row per input row: row, id, result, finish_reason,
                         prompt_tokens, completion_tokens, attempts, error (null, or its
                         type and message). During the run, rows are in the order in which
                         they finish (for Parquet in OUTPUT.journal.jsonl); at the end, in
                         the order of the input.
  OUTPUT.run.db          the results, with the input and the options of the run; keep it
                         beside the output: the same command needs it to continue
  OUTPUT.report.json     the summary as JSON
  With --api: the result file of the batch, by default INPUT with .output.jsonl at its end;
  OUTPUT.errors.jsonl has the rows that failed (.errors in place of .output), and
  OUTPUT.batch.json the id of the batch: the same command again continues it

\b
Examples:
  saturate batch questions.jsonl answers.jsonl
  saturate batch 'hf://openai/gsm8k#main/test' out.parquet \\
      --prompt-column question --chat --max-tokens 512
  saturate batch reviews.csv out.jsonl \\
      --template 'Is this review kind? {{ review }}' --limit 100
  saturate batch --api requests.jsonl
  ray job submit -- saturate batch s3://bucket/rows/ /shared/out.jsonl \\
      --app llm --model demo
      ("Authentication required": set RAY_AUTH_MODE=token, with the cluster's token in
      ~/.ray/auth_token, where Ray puts it on the machine of its head)

\b
Exit codes:
  0    every row has a result
  1    the run could not continue: there is no service, or it refuses the calls
  2    the command or the input is wrong
  3    some rows have an error
  4    the disk of the output is full, or fails
  130  interrupted
"""


class GroupedCommand(click.Command):
    """A command with its options in named groups in the help text.

    Args:
        groups: The options of each group.
        attributes: Arguments of `click.Command`; its `params` are the command's arguments.
    """

    def __init__(self, *, groups: Mapping[str, Sequence[click.Parameter]], **attributes: Any) -> None:
        arguments = attributes.pop("params", None) or []
        super().__init__(params=[*arguments, *chain.from_iterable(groups.values())], **attributes)
        self._groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups, then the options of click itself."""
        mine = {param for group in self._groups.values() for param in group}
        others = [
            param for param in self.get_params(ctx) if param not in mine and isinstance(param, click.Option)
        ]
        for name, params in {**self._groups, "Other options": others}.items():
            records = [record for param in params if (record := param.get_help_record(ctx))]
            with formatter.section(name):
                formatter.write_dl(records)


SECONDS = Number(0, min_open=True)


class _Whole(click.ParamType[int]):
    """A whole number; the help doesn't show the range, whose upper end is no real limit.

    Args:
        least: The least number.
    """

    name = "integer"

    def __init__(self, least: int) -> None:
        self._range = click.IntRange(least, sys.maxsize)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        return self._range.convert(value, param, ctx)


class _Concurrency(click.ParamType["int | str"]):
    """A number of calls, or `auto`."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Literal["auto"]:
        """Return the number, or "auto"."""
        return "auto" if value == "auto" else _Whole(1).convert(value, param, ctx)


def _option(name: str, help: str, *others: str, **attributes: Any) -> click.Option:
    shown = {"show_default": True} if attributes.get("default") and not attributes.get("is_flag") else {}
    return click.Option([name, *others], help=help, **shown, **attributes)


SAMPLING = {
    "max_tokens": (int, "Longest answer, in tokens. The service reserves this much for each row: the closer "
                   "to the real length, the more rows run at once."),
    "min_tokens": (int, "Shortest answer, in tokens."),
    "temperature": (float, "0 takes the likeliest token each time; 1 samples as the model was trained. "
                    "0 for extraction and classification, 0.7 to 1 for varied text."),
    "top_p": (float, "Sample from the likeliest tokens that have this probability together (0 to 1)."),
    "top_k": (int, "Sample from this many of the likeliest tokens; 0: from all."),
    "min_p": (float, "Leave out tokens with less than this share of the likeliest token's probability."),
    "presence_penalty": (float, "-2 to 2; above 0 makes tokens that occurred less likely."),
    "frequency_penalty": (float, "-2 to 2; above 0 makes a token less likely each time that it occurs."),
    "repetition_penalty": (float, "Above 1 makes tokens that occurred less likely, including the prompt's."),
    "seed": (int, "Makes sampling repeatable."),
}  # fmt: skip


def _needed_without_api(
    context: click.Context, parameter: click.Parameter, value: Path | None
) -> Path | None:
    if value is None and not context.params.get("api") and not context.resilient_parsing:
        raise click.MissingParameter(ctx=context, param=parameter)
    return value


ARGUMENTS: list[click.Parameter] = [
    # A path for the sake of shell completion; it may be a URL.
    click.Argument(["input"], metavar="INPUT", type=click.Path()),
    click.Argument(
        ["output"],
        metavar="OUTPUT",
        type=click.Path(path_type=Path),
        required=False,
        callback=_needed_without_api,
    ),
]

TIMEOUTS = (
    ("connect", 60, "to get a connection."),
    (
        "read",
        600,
        "without a byte from the service; it sends one every 5 s while a row waits or runs.",
    ),
    ("write", 30, "to send a row."),
)

GROUPS: dict[str, list[click.Parameter]] = {
    "Service": [
        _option(
            "--url",
            f"Reach the service over HTTP, at this address, with or without /v1.  [default: {DEFAULT_URL}]",
        ),
        _option(
            "--app",
            "Reach the service over a deployment handle of this Serve application; for Ray jobs. Needs "
            "--model.",
            metavar="NAME",
        ),
        _option("--model", "Model that answers; needed if the service has several.", metavar="ID"),
        _option("--api-key-env", "Environment variable that holds the API key.", metavar="NAME"),
        _option(
            "--service-tier",
            "Order among the requests that wait: flex after live traffic, default beside it, priority "
            "before it.",
            type=click.Choice(list(TIER_PRIORITY)),
            default="flex",
        ),
    ],
    "Batch API": [
        _option(
            "--api",
            "INPUT is a file of requests in OpenAI's batch format: the service keeps it, runs it as a batch "
            "even if this command ends, and keeps the results. OUTPUT is by default beside INPUT.",
            is_flag=True,
            is_eager=True,
        ),
        _option(
            "--window",
            "Time in which the batch is run, 1h to 7d; rows without an answer by then are errors.",
            default=DEFAULT_WINDOW,
            metavar="TIME",
        ),
    ],
    "Rows": [
        _option("--prompt-column", "Column that holds the prompt.", default="prompt", metavar="NAME"),
        _option(
            "--template",
            "Jinja template over the columns that makes the prompt, or @FILE; `row` is the whole row.",
        ),
        _option("--chat", "Send the prompt as a user's message; for chat models.", is_flag=True),
        _option("--system", "System message in front of the prompt; implies --chat."),
        _option(
            "--messages-column",
            "Column that holds whole chats: lists of objects with role and content.",
            metavar="NAME",
        ),
        _option("--id-column", "Column that holds the row's id.", default="id", metavar="NAME"),
        _option(
            "--limit",
            "Take the first N rows; 10 are enough for a first look at the answers.",
            type=_Whole(1),
            metavar="N",
        ),
        _option(
            "--input-format",
            "Format of an input whose name doesn't show it; standard input is jsonl unless given.",
            type=click.Choice(["jsonl", "json", "csv", "tsv", "parquet"]),
        ),
        _option(
            "--separator",
            "Character between the columns of CSV, such as ';' or '\\t'.  [default: , and a tab for .tsv]",
            metavar="CHAR",
        ),
    ],
    "Sampling (by default as the service's config says)": [
        *(
            _option(f"--{name.replace('_', '-')}", text, type=kind, metavar="N" if kind is int else "X")
            for name, (kind, text) in SAMPLING.items()
        ),
        _option("--stop", "Text that ends an answer; may be given several times.", multiple=True),
    ],
    "Speed and retries": [
        _option(
            "--concurrency",
            "Calls in flight, a number or auto. auto follows the service's statistics. A good number keeps "
            "several times as many rows in flight as the engines run at once (max_num_seqs x replicas).",
            "--max-concurrency",
            type=_Concurrency(),
            default="auto",
            metavar="N|auto",
        ),
        _option(
            "--retries",
            "Times that a failed row is sent again, after 0.5 s, 1 s, 2 s up to 60 s, or the time that the "
            "service asks for. 20 outlast about ten minutes without a service. A full queue (429) is waited "
            "out and doesn't count.",
            type=_Whole(0),
            default=20,
            metavar="N",
        ),
        *(
            _option(
                f"--{name}-timeout",
                f"Seconds {text}",
                type=Number(0, min_open=True),
                default=seconds,
                metavar="S",
            )
            for name, seconds, text in TIMEOUTS
        ),
    ],
    "Existing output": [
        _option("--overwrite", "Begin anew and delete the rows that are there.", is_flag=True),
        _option(
            "--resume",
            "Keep the rows that are there and continue although input or options have changed (a larger "
            "--limit, rows added at the end). Without changes the command continues without --resume.",
            is_flag=True,
        ),
    ],
    "What is shown": [
        _option(
            "--report",
            "Path of the JSON report.  [default: OUTPUT.report.json]",
            type=click.Path(path_type=Path),
            metavar="FILE",
        ),
        _option("--quiet", "Show errors only, neither progress nor summary.", is_flag=True),
    ],
}


def chosen(values: Mapping[str, Any]) -> SimpleNamespace:
    """Return the options of one command line as attributes.

    Raises:
        click.UsageError: The options contradict each other, or an option can't be used.
    """
    options = SimpleNamespace(**values)
    _check_texts(options)
    if options.separator is not None:
        options.separator = _separator(options.separator)
    if options.api:
        _check_api(options)
    elif options.window != DEFAULT_WINDOW:
        raise click.UsageError("--window: only with --api")
    if options.overwrite and options.resume:
        raise click.UsageError("--resume: not allowed with --overwrite")
    if options.app and options.url:
        raise click.UsageError("--url and --app: take one, HTTP or a deployment handle")
    if options.app and not options.model:
        raise click.UsageError("--app needs --model: a handle belongs to the Engine of one model")
    if not options.app and not options.url:
        options.url = DEFAULT_URL
    return options


def _separator(text: str) -> str:
    found = "\t" if text == "\\t" else text
    if len(found) != 1 or found in '"\r\n':
        raise click.UsageError(f"--separator: must be one character, such as ; or \\t, not {text!r}")
    return found


SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Part of a text whose bytes are not UTF-8."""

NEVER_EMPTY = ("url", "app", "model")
"""Options that say where the rows go: an empty value would send them elsewhere."""


def _check_texts(options: SimpleNamespace) -> None:
    """Raise a UsageError for a text that can't be used."""
    for name in NEVER_EMPTY:
        if getattr(options, name) == "":
            raise click.UsageError(f"--{name}: the value is empty; give one, or leave the option out")
    for parameter in chain.from_iterable(GROUPS.values()):
        given = getattr(options, str(parameter.name))
        for text in given if isinstance(given, tuple) else (given,):
            if isinstance(text, str) and SURROGATE.search(text):
                raise click.UsageError(f"{parameter.opts[0]}: must be UTF-8 text, not {text!r}")


API_OPTIONS = {
    "input",
    "output",
    "api",
    "window",
    "url",
    "api_key_env",
    "retries",
    "overwrite",
    "quiet",
    *(f"{name}_timeout" for name, *_ in TIMEOUTS),
}
"""The options that go with `--api`."""


def _check_api(options: SimpleNamespace) -> None:
    """Raise a UsageError for an option about rows: the file of requests has whole requests."""
    for parameter in chain.from_iterable(GROUPS.values()):
        name = str(parameter.name)
        default = () if parameter.multiple else parameter.default
        given = getattr(options, name)
        # A 0 equals False.
        left_out = given is None or given is False or given == default
        if name not in API_OPTIONS and not left_out:
            raise click.UsageError(f"{parameter.opts[0]}: not with --api, where INPUT has whole requests")


def sampling_fields(options: SimpleNamespace) -> JSON:
    """Return the sampling fields that were given.

    Raises:
        RunError: A value is out of range.
    """
    given = {name: getattr(options, name) for name in SAMPLING} | {"stop": list(options.stop) or None}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingFields.model_validate(given).sampling()
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        name = str(item["loc"][0]).replace("_", "-")
        raise RunError(f"--{name}: {item['msg']}, not {item['input']!r}") from None
