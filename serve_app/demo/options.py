"""Command-line options that all trainings of the demo have."""

import argparse
from pathlib import Path


def training_parser(
    module: str, description: str, *, out: Path, steps: int, examples: str | None = None
) -> argparse.ArgumentParser:
    """Return the parser of a training: its options are `out`, `steps`, `seed` and `threads`.

    Args:
        module: The module that is run, as `python -m` takes it.
        description: What it does and how long it takes; its lines stay as they are.
        out: The folder that is written by default.
        steps: The steps that are made by default.
        examples: Text behind the options.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=out, help="folder to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="how long to train (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="chooses first weights, order, and the unseen")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use (default: %(default)s)")
    return parser
