"""The command `saturate`."""

import click

from serve_app.cli.lazy import LazyGroup
from serve_app.system.command_line import run
from serve_app.system.distribution import version

COMMANDS = {
    "serve": ("serve_app.cli.serve:serve", "Serve a model, or the models of a config, until Ctrl-C."),
    "batch": ("serve_app.dataset.command:batch", "Send a dataset through a service."),
    "keys": ("serve_app.auth.command:keys", "Make and change API keys."),
    "usage": ("serve_app.cli.usage:usage", "Report usage by tenant, key or model."),
    "top": ("serve_app.cli.top:top", "Show live figures of a service."),
    "doctor": ("serve_app.cli.doctor:doctor", "Check this machine or a config, and suggest fixes."),
    "plan": ("serve_app.cli.plan:plan", "Find the replicas and settings that hold latency goals."),
    "tune": (
        "serve_app.cli.tune:tune",
        "Find the highest load that holds latency goals, and settings for it.",
    ),
    "profile": ("serve_app.cli.profile:profile", "Print the step times of a running device, for plan."),
    "schema": ("serve_app.cli.schema:schema", "Print the JSON Schema of configs, for editors."),
    "stop": ("serve_app.cli.stop:stop", "Stop the services on this machine."),
}
"""Place and help line of each subcommand."""


def main() -> None:
    """Run the command line."""
    run(saturate)


@click.group(cls=LazyGroup, places=COMMANDS)
@click.version_option(version(), prog_name="saturate", message="%(prog)s %(version)s")
def saturate() -> None:
    """LLM serving that keeps GPUs full, on Ray Serve and vLLM.

    \b
    A first service, without a GPU and without a download:
      saturate serve demo
    then in another terminal
      curl http://127.0.0.1:8000/generate -d '{"prompts": ["What is 2+3?"]}' \\
        -H 'content-type: application/json'

    `demo` is a small model that adds and subtracts; in its place goes a Hugging Face id, a directory, or a
    config. http://127.0.0.1:8000/ in a browser is a page to try the model. `saturate COMMAND --help` has
    examples of each command.

    \b
    Shell completion, for bash (zsh and fish alike):
      eval "$(_SATURATE_COMPLETE=bash_source saturate)"
    """
