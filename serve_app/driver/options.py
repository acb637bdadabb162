"""The options of the command line, and what each is good for."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from serve_app.api.protocol import JSON, SamplingFields
from serve_app.api.scheduling import TIER_PRIORITY
from serve_app.driver.errors import DriverError

PROG = "python -m serve_app.driver"
COMMAND = "saturate-batch"

DESCRIPTION = """\
Send every row of a dataset through a service and write a row for each: its result, or why it has none.
Stop it, kill it, or let the machine crash: the same command goes on where it was."""

EPILOG = """\
input:
  prompts.jsonl, data.csv, data.parquet   a file (.jsonl and .csv also as .gz, .bz2, .zst)
  data/                                   a folder with all below it
  'data/*.jsonl', 'data/**/*.parquet'     a pattern; quote it
  s3://bucket/data/, gs://bucket/x.jsonl  the same in object storage
  hf://openai/gsm8k#main/test             a Hugging Face dataset: NAME#CONFIG/SPLIT
  -                                       standard input

output:
  OUTPUT                 a row per row of the input: row, id, result, finish_reason, prompt_tokens,
                         completion_tokens, attempts, and error: null, or its type and message.
                         While the run lasts, rows stand in the order in which they were done (for Parquet: in
                         OUTPUT.journal.jsonl); when all are done, in the order of the input.
  OUTPUT.manifest.json   what the output was made from; keep it beside the output
  OUTPUT.report.json     the summary as JSON

examples:
  %(prog)s questions.jsonl answers.jsonl
  %(prog)s 'hf://openai/gsm8k#main/test' out.parquet --prompt-column question --chat --max-tokens 512
  %(prog)s reviews.csv out.jsonl --template 'Is this review kind? {{ review }}' --limit 100
  ray job submit -- %(prog)s s3://bucket/rows/ /shared/out.jsonl --app llm --model demo
      (where it says "Authentication required": RAY_AUTH_MODE=token in front of it, and the cluster's token in
      ~/.ray/auth_token, where Ray has put it on the machine that it was started on)

exit codes: 0 every row has a result, 1 the run could not go on, 2 a mistake in the command, 3 some rows
have an error, 130 interrupted."""

SAMPLING: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "longest answer, in tokens; the service reserves this much for each row, so a number "
                   "near the real length lets more rows run at once"),
    "min_tokens": (int, "shortest answer, in tokens"),
    "temperature": (float, "0 always takes the likeliest token, 1 draws as the model says"),
    "top_p": (float, "draw from the likeliest tokens that together have this probability"),
    "top_k": (int, "draw from this many tokens; 0: from all"),
    "min_p": (float, "leave out tokens less likely than this share of the likeliest one"),
    "presence_penalty": (float, "above 0: against tokens that occurred"),
    "frequency_penalty": (float, "above 0: against tokens, the more the more often they occurred"),
    "repetition_penalty": (float, "above 1: against tokens that occurred, those of the prompt too"),
    "seed": (int, "makes drawing repeatable"),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    called = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(
        prog=called if called == COMMAND else PROG,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", metavar="INPUT", help="what to read; see below")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="a local .jsonl or .parquet file")

    service = parser.add_argument_group("service")
    service.add_argument("--url", help="reach it over HTTP (http://127.0.0.1:8000, unless --app is given)")
    service.add_argument(
        "--app", help="reach it over a deployment handle: its Serve application; for Ray jobs, needs --model"
    )
    service.add_argument("--model", help="which model answers; needed where several are served")
    service.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="environment variable that holds the API key, where one is asked",
    )
    service.add_argument(
        "--service-tier",
        choices=list(TIER_PRIORITY),
        default="flex",
        help="who goes first (flex): flex waits behind live traffic, default shares with it, priority goes "
        "before",
    )

    rows = parser.add_argument_group("rows")
    rows.add_argument("--prompt-column", default="prompt", metavar="NAME", help="holds the prompt (prompt)")
    rows.add_argument(
        "--template",
        help="a Jinja template over the columns instead, or @FILE; `row` is the whole row",
    )
    rows.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's message; for chat models"
    )
    rows.add_argument("--system", metavar="TEXT", help="a system message in front of it; means --chat")
    rows.add_argument(
        "--messages-column", metavar="NAME", help="holds whole chats: lists of role and content"
    )
    rows.add_argument("--id-column", default="id", metavar="NAME", help="holds the row's id (id)")
    rows.add_argument("--limit", type=_positive, metavar="N", help="take the first N rows; try with 10 first")
    rows.add_argument(
        "--input-format",
        choices=["jsonl", "csv", "parquet"],
        help="where the name doesn't say (jsonl from standard input)",
    )

    sampling = parser.add_argument_group("sampling; what is left out is for the service's config to say")
    for name, (kind, text) in SAMPLING.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=name[0].upper(), help=text)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="ends an answer; may be repeated")

    pace = parser.add_argument_group("pace")
    pace.add_argument(
        "--chunk-size",
        type=_positive,
        default=50,
        metavar="N",
        help="rows in a call (50); more cost less per row, fewer lose less when a call fails",
    )
    pace.add_argument(
        "--max-concurrency",
        type=_concurrency,
        default=10,
        metavar="N",
        help="calls at once (10): their rows should be several times what the engine runs at once "
        "(max_num_seqs x replicas); auto follows the service's statistics and 429s up and down",
    )
    pace.add_argument(
        "--retries",
        type=_not_negative,
        default=20,
        metavar="N",
        help="how often a call that fails is sent again (20), after 0.5 s, 1 s, 2 s and so on up to 60 s, or "
        "what the service asks for; 20 outlast some ten minutes without a service. A full queue (429) is "
        "waited out, however long",
    )
    for name, seconds, text in (
        ("connect", 60.0, "to get a connection"),
        ("read", 600.0, "for a chunk's answer: its whole work, and a cold start before it"),
        ("write", 30.0, "to send a chunk"),
        ("pool", 10.0, "for a free connection"),
    ):
        pace.add_argument(
            f"--{name}-timeout",
            type=_seconds,
            default=seconds,
            metavar="S",
            help=f"seconds {text} ({seconds:g})",
        )

    again = parser.add_argument_group("rows that are there already")
    existing = again.add_mutually_exclusive_group()
    existing.add_argument(
        "--overwrite", action="store_true", help="begin anew; the rows that are there are deleted"
    )
    existing.add_argument(
        "--resume",
        action="store_true",
        help="keep them and go on though input or options have changed (a larger --limit, rows added at the "
        "end); when nothing has changed it goes on without this",
    )

    seen = parser.add_argument_group("what you see")
    seen.add_argument("--report", type=Path, metavar="FILE", help="the JSON report (OUTPUT.report.json)")
    seen.add_argument("--quiet", action="store_true", help="no progress, no summary; errors are still shown")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a mistake ends the process with exit code 2."""
    reader = parser()
    options = reader.parse_args(arguments)
    if options.app and options.url:
        reader.error("--url and --app: take one, HTTP or a deployment handle")
    if options.app and not options.model:
        reader.error("--app needs --model: a handle is of one model's Engine")
    if not options.app and not options.url:
        options.url = "http://127.0.0.1:8000"
    return options


def sampling_fields(options: argparse.Namespace) -> JSON:
    """Return the sampling fields that were given.

    Raises:
        DriverError: A value is out of range.
    """
    given = {name: getattr(options, name) for name in [*SAMPLING, "stop"]}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingFields.model_validate(given).sampling()
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        name = str(item["loc"][0]).replace("_", "-")
        raise DriverError(f"--{name}: {item['msg']}, not {item['input']!r}") from None


def _number(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"must be {least} or more, not {number}")
    return number


def _positive(text: str) -> int:
    return _number(text, 1)


def _not_negative(text: str) -> int:
    return _number(text, 0)


def _concurrency(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else _number(text, 1)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return seconds
