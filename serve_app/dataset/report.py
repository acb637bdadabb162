"""Report of a run: JSON for programs, a table for people."""

import json
from pathlib import Path

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import OutputError, written
from serve_app.system.disk import drafted


def report(
    output: Path, outcome: str, before: int, this_run: JSON, all_rows: JSON, message: str = ""
) -> JSON:
    """Return the report.

    Args:
        output: Path of the output.
        outcome: "complete", "interrupted" or "failed".
        before: Number of rows of earlier runs.
        this_run: Statistics of this run.
        all_rows: Totals of the whole output.
        message: Error of a run that failed.
    """
    return {
        "output": str(output),
        "outcome": outcome,
        **({"message": message} if message else {}),
        "rows_before": before,
        "this_run": this_run,
        "output_rows": all_rows,
    }


def write_report(path: Path, body: JSON) -> None:
    """Write a report.

    Raises:
        OutputError: The report can't be written.
    """
    if not path.parent.is_dir():
        raise OutputError(f"--report {path}: there is no folder {path.parent}")
    with written(path), drafted(path) as draft:
        draft.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n")


def table(body: JSON) -> str:
    """Return a report as lines for a terminal."""
    run, rows = body["this_run"], body["output_rows"]
    latency = run["call_latency"]
    lines = [("rows", f"{rows['rows']:,}: {rows['with_result']:,} with a result, {rows['failed']:,} failed")]
    lines += [("  " + type, f"{count:,}") for type, count in rows["failed_by_type"].items()]
    if body["rows_before"]:
        lines.append(("this run", f"{run['rows']:,} rows; {body['rows_before']:,} were done before"))
    lines.append(("time", f"{run['elapsed_s']:,.1f} s"))
    if run["rows"]:
        lines += [
            ("throughput", f"{run['rows_per_s']:,.1f} rows/s, {run['tokens_per_s']:,.0f} tokens/s"),
            ("tokens", f"{run['prompt_tokens']:,} in, {run['completion_tokens']:,} out"),
        ]
    if latency["p50_s"] is not None:
        times = (f"{name[:-2]} {_time(seconds)}" for name, seconds in latency.items())
        lines.append(
            ("calls", f"{run['calls']:,} answered, {run['retries']:,} further tries; {', '.join(times)}")
        )
    if run["utilization"] is not None:
        lines.append(("batcher", f"{run['utilization']:.1%} of the time busy"))
    driver = run["driver"]
    if driver["cpu_us_per_row"] is not None:
        cpu = f"{driver['cpu_s']:.2f} s CPU, {driver['cpu_us_per_row']:,.0f} us a row"
        lines.append(("driver", f"{cpu}, {driver['peak_memory_mib']:,.0f} MiB"))
    lines.append(("output", body["output"]))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
