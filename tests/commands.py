"""Checks the commands of the pages without running them."""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module

import click

from serve_app.system import distribution
from tests.pages import ROOT

EXTERNAL = {"curl", "dmesg", "export", "git", "grep", "helm", "kind", "mkdir", "nvidia-smi", "source", "tar"}
"""Programs of others; only the paths in their arguments are checked."""

FOLDERS = ("batcher/", "configs/", "k8s/", "serve_app/", "tests/")
ASSIGNMENT = re.compile(r"[A-Z_]+=")
SEPARATORS = {"|", "||", "&&", ";", "&", "|&"}
REDIRECTIONS = {">", ">>", "<", "2>"}


class CommandError(Exception):
    """A command of a page can't be right; the message says why."""


def lines(script: str) -> list[str]:
    """Return the commands of a script or a console, with continued lines joined."""
    joined = script.replace("\\\n", " ")
    prompts = [line for line in joined.splitlines() if line.startswith("$ ")]
    kept = [line[2:] for line in prompts] if prompts else joined.splitlines()
    return [line for line in kept if line.strip() and not line.lstrip().startswith("#")]


def split(line: str) -> Iterator[list[str]]:
    """Yield the words of each program in a line of a shell, without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    skip = False
    for word in lexer:
        if word in SEPARATORS:
            if words:
                yield words
            words = []
        elif word in REDIRECTIONS:
            skip = True
        elif skip:
            skip = False
        elif words or not ASSIGNMENT.match(word):
            words.append(word)
    if words:
        yield words


def check(line: str) -> None:
    """Raise a CommandError if a program, target, option or path of a command doesn't exist.

    Args:
        line: A line of a shell.
    """
    for words in split(line):
        _check_paths(words)
        _check_program(words)


def _check_paths(words: list[str]) -> None:
    for word in words[1:]:
        for part in word.split("="):
            if part.startswith(FOLDERS) and "NAME" not in part and not (ROOT / part).exists():
                raise CommandError(f"{part}: there is no such file")


def _check_program(words: list[str]) -> None:
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    match program:
        case "saturate":
            _check_saturate(arguments)
        case "make":
            _check_make(arguments)
        case "python":
            _check_python(arguments)
        case "pip" | "uv":
            _check_extras(arguments)
        case "kubectl":
            _check_kustomize(arguments)
        case "docker":
            _check_docker(arguments)
        case "sudo" | "env":
            _check_program([word for word in arguments if not ASSIGNMENT.match(word)])
        case "ray" if "--" in arguments:
            _check_program(arguments[arguments.index("--") + 1 :])
        case "ray":
            _check_ray("ray.scripts.scripts", program, arguments)
        case "serve":
            _check_ray("ray.serve.scripts", program, arguments)
        case _ if program not in EXTERNAL:
            raise CommandError(f"{program}: unknown program; add it to tests/commands.py")


def command(*names: str) -> click.Command:
    """Return a command of `saturate`, such as `command("keys", "new")`.

    Raises:
        CommandError: There is none of that name.
    """
    found: click.Command = import_module("serve_app.cli.main").saturate
    for name in names:
        if not isinstance(found, click.Group) or name not in found.commands:
            raise CommandError(f"saturate {' '.join(names)}: no such command")
        # A command that is imported when it is used is known by its context.
        found = found.commands[name].make_context(name, [], resilient_parsing=True).command
    return found


def _check_ray(module: str, program: str, arguments: list[str]) -> None:
    """Let a command of Ray parse its arguments; nothing of it runs."""
    found: click.Command = import_module(module).cli
    words = list(arguments)
    while isinstance(found, click.Group) and words:
        name = words.pop(0)
        if name not in found.commands:
            raise CommandError(f"{program} {name}: no such command")
        found = found.commands[name]
    if not words:
        # The name of a command in a sentence.
        return
    try:
        with found.make_context(program, words):
            pass
    except click.exceptions.Exit:
        # --version and --help end it.
        pass
    except click.ClickException as error:
        raise CommandError(f"{program} {' '.join(arguments)}: {error.format_message()}") from None


def _check_saturate(arguments: list[str]) -> None:
    """Let the command parse its arguments; nothing of it runs."""
    names: list[str] = []
    while isinstance(command(*names), click.Group) and arguments and not arguments[0].startswith("-"):
        names.append(arguments[0])
        arguments = arguments[1:]
    if not arguments:
        # The name of a command in a sentence.
        command(*names)
        return
    try:
        with command(*names).make_context("saturate", list(arguments)):
            pass
    except click.exceptions.Exit:
        # --version and --help end it.
        pass
    except click.ClickException as error:
        raise CommandError(f"saturate {' '.join(names)}: {error.format_message()}") from None


def _check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in arguments:
        if not ASSIGNMENT.match(word) and not re.search(rf"^{re.escape(word)}:", makefile, re.M):
            raise CommandError(f"make {word}: no such target")


def _check_python(arguments: list[str]) -> None:
    if len(arguments) < 2 or arguments[0] != "-m":
        raise CommandError("python: only `python -m MODULE` is known here")
    if importlib.util.find_spec(arguments[1]) is None:
        raise CommandError(f"python -m {arguments[1]}: no such module")


def _check_extras(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in arguments:
        for named in re.findall(r"\[([\w,]+)\]", word):
            for extra in named.split(","):
                if extra not in extras:
                    raise CommandError(f"{word}: no extra {extra!r}")


def _check_kustomize(arguments: list[str]) -> None:
    folder = None
    if "-k" in arguments[:-1]:
        folder = arguments[arguments.index("-k") + 1]
    elif arguments[:1] == ["kustomize"] and len(arguments) > 1:
        folder = arguments[1]
    if folder is None or "NAME" in folder:
        return
    if not (ROOT / folder / "kustomization.yaml").exists():
        raise CommandError(f"{folder}: there is no kustomization.yaml")


RUN_FLAGS = {"--rm", "-d", "--read-only"}
RUN_VALUES = {"--name", "-p", "-v", "-e", "--gpus", "--shm-size", "--stop-timeout", "--tmpfs"}
"""Options of `docker run` that the pages use, without a value and with one."""


def check_image(name: str) -> None:
    """Raise a CommandError if the Dockerfile makes no image of a name, at the version of the package."""
    version = distribution.version()
    target, _, tag = name.removeprefix("saturate-").partition(":")
    if not name.startswith("saturate-") or tag != version:
        raise CommandError(f"{name}: must be saturate-TARGET:{version}")
    _check_target("k8s/Dockerfile", target)


def _check_target(path: str, target: str) -> None:
    if not re.search(rf"^FROM .* AS {re.escape(target)}$", (ROOT / path).read_text(), re.M):
        raise CommandError(f"{path}: no stage {target}")


def _check_docker(arguments: list[str]) -> None:
    if arguments[:1] == ["run"]:
        _check_docker_run(arguments[1:])
    elif "--target" in arguments:
        path = arguments[arguments.index("-f") + 1]
        target = arguments[arguments.index("--target") + 1]
        _check_target(path, target)
        check_image(arguments[arguments.index("-t") + 1])


def _check_docker_run(arguments: list[str]) -> None:
    words = list(arguments)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in RUN_VALUES and words:
            words.pop(0)
        elif option not in RUN_FLAGS:
            raise CommandError(f"docker run {option}: unknown; add it to tests/commands.py")
    if not words:
        # The name of a command in a sentence.
        return
    check_image(words[0])
    _check_saturate(words[1:])
