"""The command `saturate serve`."""

from pathlib import Path

import click

DEMO = Path(__file__).parents[2] / "configs/local.yaml"
"""The demo config; a checkout has it, an installed package doesn't."""


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--verbose", is_flag=True, help="Show the log of Ray, Serve and vLLM too.")
@click.option(
    "--log-format",
    type=click.Choice(["json", "text"]),
    help="Print a line per request: json for programs, text for people. Takes the place of "
    "telemetry.request_log in the config.",
)
def serve(config: Path | None, verbose: bool, log_format: str | None) -> int:
    """Serve the models of CONFIG until Ctrl-C, SIGTERM or `saturate stop`.

    CONFIG is a config of Ray Serve; by default the demo, configs/local.yaml of the repository, which needs no
    GPU and no download.

    The command checks the config, shows the progress to "Ready", and stays in the foreground. To stop, it
    lets requests in flight finish; a second Ctrl-C cuts them off. However it ends, no process of the service
    is left: neither after a closed terminal nor after SIGKILL.

    \b
    Examples:
      saturate serve
      saturate serve configs/qwen2.5-7b-l4.yaml --log-format text
    """
    if config is None and not DEMO.is_file():
        raise click.UsageError(
            "missing argument 'CONFIG': name a Serve config; the demo, configs/local.yaml, is part of the "
            "repository and not of the installed package"
        )
    # Ray takes a second to import: `--help` and completion do without it.
    from serve_app.cli.launch import launch

    return launch(config or DEMO, verbose=verbose, log_format=log_format)
