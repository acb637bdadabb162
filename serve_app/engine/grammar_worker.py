"""A process that parses grammars as vLLM will, so that a hostile one ends this process and not an engine.

    python -m serve_app.engine.grammar_worker CPU_S MEMORY_BYTES PARENT

It reads a line of JSON per grammar, `[kind, text]`, and answers each with a line. A grammar that takes more
than CPU_S seconds of CPU or more than MEMORY_BYTES ends the process.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from serve_app.system.parent_death import end_with

READY = "ready"


def main() -> None:
    """Answer until standard input ends."""
    cpu_s, memory, parent = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    end_with(parent, signal.SIGKILL)
    # Imported here, by the process that needs it: it takes seconds.
    import xgrammar

    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    # The kernel ends the process when its time is up: native code doesn't run Python's handlers.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # A parent that blocks signals, as Ray's workers do, hands that on.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    print(READY, flush=True)
    for line in sys.stdin:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        # vLLM reports its errors.
        with suppress(Exception):
            _parse(xgrammar.Grammar, kind, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(flush=True)


def _parse(grammar: Any, kind: str, text: str) -> None:
    match kind:
        case "json":
            grammar.from_json_schema(text)
        case "regex":
            grammar.from_regex(text)
        case "grammar":
            grammar.from_ebnf(text)
        case "structural_tag":
            grammar.from_structural_tag(text)
        case "choice":
            choices = " | ".join(json.dumps(str(choice)) for choice in json.loads(text))
            grammar.from_ebnf(f"root ::= {choices}")


if __name__ == "__main__":
    main()
