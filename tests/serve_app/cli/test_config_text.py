"""The text of a config with the variables that it leaves out."""

import pytest
import yaml

from serve_app.cli.config_text import completed
from serve_app.settings.completion import complete_config

SHORT = """\
# My service.

http_options: {host: 127.0.0.1}

applications:
  # The only one.
  - name: llm
    import_path: serve_app.app:build
    # What is served.
    args:
      models:
        - {id: demo, source: "saturate://demo"}  # quick
"""

CONTROLLER = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR: serve_app.ingress.haproxy.prepare"
REPLICAS = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR: serve_app.settings.environment.prepare"


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def kept_in_order(text: str, whole: str) -> bool:
    """Return whether all lines of a text are in another one, in their order."""
    rest = iter(lines_of(whole))
    return all(line in rest for line in lines_of(text))


def test_lines_are_added_and_all_others_stay() -> None:
    whole = completed(SHORT)
    assert yaml.safe_load(whole) == complete_config(yaml.safe_load(SHORT))
    assert kept_in_order(SHORT, whole)
    assert f"\n      {CONTROLLER}\n" in whole
    # The comment of `args` stays above it.
    assert "\n    # What is served.\n    args:\n" in whole
    assert f"\n        # The same for the replicas.\n        {REPLICAS}\n" in whole


def test_a_complete_text_is_left_as_it_is() -> None:
    whole = completed(SHORT)
    assert completed(whole) == whole


def test_a_comment_stays_above_its_value() -> None:
    whole = completed(PARTS["a variable of the controller"])
    assert "      # Mine.\n      MINE: x\n" in whole


PARTS = {
    "a variable of the controller": SHORT
    + "controller_options:\n  runtime_env:\n    env_vars:\n      # Mine.\n      MINE: x\n",
    "a variable of the replicas": SHORT.replace(
        "    # What", "    runtime_env:\n      env_vars:\n        MINE: x\n    # What"
    ),
    "a folder of the replicas": SHORT.replace(
        "    # What", "    runtime_env:\n      working_dir: w\n    # What"
    ),
    "args first": "applications:\n- args:\n    models: []\n  import_path: serve_app.app:build\n",
    "no comment at all": "".join(line for line in SHORT.splitlines(True) if "#" not in line),
    "a comment right above": SHORT.replace("service.\n\n", "service.\n"),
    "two applications": SHORT
    + "  # The second.\n  - import_path: other:app\n    name: o\n    route_prefix: /o\n"
    + "  - import_path: serve_app.app:build\n    name: p\n    route_prefix: /p\n    args: {models: []}\n",
    "the start of a document": "---\n" + SHORT,
    "no end of the last line": SHORT.rstrip("\n"),
}


@pytest.mark.parametrize("text", PARTS.values(), ids=PARTS)
def test_what_is_there_stays_wherever_it_is(text: str) -> None:
    whole = completed(text)
    assert yaml.safe_load(whole) == complete_config(yaml.safe_load(text))
    assert kept_in_order(text, whole)
    assert CONTROLLER in whole
    assert REPLICAS in whole


def test_a_comment_of_the_next_value_stays_above_it() -> None:
    whole = completed(PARTS["a folder of the replicas"])
    assert "\n    # What is served.\n    args:\n" in whole
    assert "\n  # The second.\n  - import_path: other:app\n" in completed(PARTS["two applications"])


ONE_LINE = {
    "all of it": "{applications: [{import_path: 'serve_app.app:build', name: a, args: {}}]}",
    "an application": "applications:\n- {import_path: 'serve_app.app:build', name: a}\n",
    "the environment": SHORT.replace("    args", "    runtime_env: {}\n    args"),
    "the controller": SHORT + "controller_options: {runtime_env: {env_vars: {}}}\n",
    "nothing": SHORT + "controller_options:\n",
    "one key": "applications:\n- import_path: serve_app.app:build\n",
    "an anchor": SHORT.replace("    args:", "    runtime_env: &r\n      env_vars: {A: b}\n    args:")
    + "controller_options:\n  runtime_env: *r\n",
}


@pytest.mark.parametrize("text", ONE_LINE.values(), ids=ONE_LINE)
def test_a_config_without_room_for_lines_is_written_anew(text: str) -> None:
    assert yaml.safe_load(completed(text)) == complete_config(yaml.safe_load(text))
