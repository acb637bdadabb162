"""The command `saturate keys`: makes, lists and checks API keys.

saturate keys new --name ada --tenant research >> keys.yaml
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from serve_app.auth.keys import Key, expired_keys, hash_key, new_key, plain_keys, read_keys
from serve_app.settings.schema import SettingsError
from serve_app.settings.usage import Quota
from serve_app.system.command_line import WrongInput, run
from serve_app.system.tables import text_table
from serve_app.system.yaml_text import dump

Command = TypeVar("Command", bound=Callable[..., object])

_file = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


def main() -> None:
    """Run the command line."""
    run(keys)


@click.group()
def keys() -> None:
    """Make and check API keys for the file that `access.keys_file` of a config names.

    Exit codes: 0 done; 1 `check` has found a mistake; 2 the command or the file is wrong.
    """


def _list_option(name: str, help: str, metavar: str) -> Callable[[Command], Command]:
    return click.option(name, multiple=True, metavar=f"{metavar}[,{metavar}]", help=f"{help}  [default: all]")


def _limit_options(command: Command) -> Command:
    """Add an option for each limit of a quota."""
    for name, field in reversed(Quota.model_fields.items()):
        about = str(field.description).rstrip(".")
        command = click.option(
            f"--{name.replace('_', '-')}",
            type=int,
            metavar="N",
            help=f"{about}, at all replicas together; needs args.usage.quotas.  [default: no limit]",
        )(command)
    return command


@keys.command()
@click.option(
    "--name",
    required=True,
    help="Person or program that gets the key; a name of the file gets a second secret.",
)
@click.option("--tenant", required=True, help="Tenant of its requests; tenants share the engines fairly.")
@click.option(
    "--weight",
    type=float,
    help="The tenant's share relative to other tenants: 2 gets twice the tokens of 1.  "
    "[default: the model's batcher.tenant_weights]",
)
@_list_option(
    "--tiers",
    "Service tiers that the key may use, of priority, default, flex; `flex` alone for batch work.",
    "TIER",
)
@_list_option("--models", "Models that the key may use.", "ID")
@_list_option("--allow-from", "Addresses from which the key may be used, such as 10.0.0.0/8.", "RANGE")
@click.option(
    "--expires",
    metavar="TIME",
    help="Date, or time with its zone, at which the key becomes invalid: 2027-01-31, "
    "2027-01-31T18:00:00Z.  [default: never]",
)
@_limit_options
@click.option(
    "--any-tenant",
    is_flag=True,
    help="Requests with this key may name other tenants; for a gateway that serves several.",
)
@click.option("--admin", is_flag=True, help="The key may list all keys and their use.")
@click.argument("more_tiers", nargs=-1, metavar="")
def new(
    tiers: tuple[str, ...],
    models: tuple[str, ...],
    allow_from: tuple[str, ...],
    more_tiers: tuple[str, ...],
    **values: Any,
) -> None:
    """Make a key and print its entry for the keys file.

    The entry, on standard output, has the hash of the key. The key is shown once, on standard error, and kept
    nowhere.

    A name that the file has already gets a second secret: both are valid, and share quota and use. Give the
    same options as for the first secret, except --expires. Once its clients use the new secret, delete the
    older entry.

    \b
    Examples:
      saturate keys new --name ada --tenant research >> keys.yaml
      saturate keys new --name nightly --tenant batch --tiers flex >> keys.yaml
      saturate keys new --name trial --tenant guests --requests-per-minute 60 --tokens-per-day 100000
    """
    if more_tiers and not tiers:
        raise click.UsageError(f"got unexpected extra argument {more_tiers[0]!r}")
    key = _new_key()
    entry = {name: value for name, value in values.items() if value is not None and value is not False}
    # `--tiers flex default` is the form of earlier versions.
    for field, texts in (("tiers", (*tiers, *more_tiers)), ("models", models), ("allow_from", allow_from)):
        if texts:
            entry[field] = [each for text in texts for each in text.split(",")]
    entry["sha256"] = hash_key(key.encode())
    if quota := {name: entry.pop(name) for name in Quota.model_fields if name in entry}:
        entry["quota"] = quota
    text = dump([entry])
    try:
        read_keys(text, "the key")
    except SettingsError as error:
        raise WrongInput(str(error)) from None
    print(text, end="", flush=True)
    _show(entry["name"], key)


@keys.command("list")
@_file
@click.option("--json", "as_json", is_flag=True, help="JSON, as from `GET /v1/admin/keys`.")
def list_(file: Path, as_json: bool) -> None:
    """List the keys of a file, without their hashes."""
    found = _read(file, _text(file))
    now = time.time()
    if as_json:
        print(json.dumps([key.describe(now) for key in found], indent=1))
        return
    head = ("name", "tenant", "state", "expires", "tiers", "models", "limits", "from", "")
    rows = [_row(key, now) for key in found]
    print("\n".join(text_table(head, rows, left=range(len(head)))))


@keys.command()
@_file
def check(file: Path) -> None:
    """Check a keys file, as the service does when it reads it.

    With an error, the service would refuse the file and keep its present keys. With a warning, on standard
    error, it would accept the file.
    """
    text = _text(file)
    try:
        found = _read(file, text)
    except WrongInput as error:
        # The check has found it.
        raise click.ClickException(error.message) from None
    for line in expired_keys(found, time.time()):
        print(f"warning: {file}: {line}", file=sys.stderr)
    for name in plain_keys(text, found):
        print(f"warning: {file}: has the key of {name} in plain text; the hash is enough", file=sys.stderr)
    count = len({key.name for key in found})
    print(f"{file}: {count} key{'s' * (count != 1)}")


def _new_key() -> str:
    """Return a new key; exit if standard error, which shows it, is closed."""
    if sys.stderr is None:
        # `print` would take standard output, which may be the keys file.
        sys.exit(1)
    return new_key()


def _show(name: str, key: str) -> None:
    print(f"The key of {name}, shown only now:\n{key}", file=sys.stderr)


def _text(file: Path) -> str:
    try:
        # Line ends stay as they are.
        with file.open(newline="", encoding="utf-8") as opened:
            return opened.read()
    except OSError as error:
        raise WrongInput(f"{file}: {error.strerror}") from None
    except ValueError:
        raise WrongInput(f"{file}: it is not UTF-8") from None


def _read(file: Path, text: str) -> list[Key]:
    try:
        return read_keys(text, str(file))
    except SettingsError as error:
        raise WrongInput(str(error)) from None


def _row(key: Key, now: float) -> tuple[str, ...]:
    quota = key.quota.model_dump(exclude_none=True) if key.quota else {}
    limits = [f"{name} {limit}" for name, limit in quota.items()]
    marks = [
        "admin" if key.admin else "",
        "any tenant" if key.any_tenant else "",
    ]
    return (
        key.name,
        key.tenant,
        key.state(now),
        f"{key.expires:%Y-%m-%d %H:%M}" if key.expires else "never",
        _joined(key.tiers),
        _joined(key.models or ["all"]),
        _joined(limits) or "none",
        _joined(map(str, key.allow_from)) if key.allow_from else "anywhere",
        _joined(marks),
    )


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(text for text in texts if text)


if __name__ == "__main__":
    main()
