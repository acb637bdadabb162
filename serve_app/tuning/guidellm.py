"""GuideLLM as the load generator: its command sends the requests of a load step, its report has their times.

GuideLLM (https://github.com/vllm-project/guidellm) has several processes, so it sends more requests than one
process can. It is a command of its own, since it needs other packages than the service. Its configuration and
its report are those of version 0.8.
"""

import asyncio
import json
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from serve_app.api.protocol import JSON
from serve_app.client import ServiceError
from serve_app.tuning.generator import Generator
from serve_app.tuning.load_step import Answer, Load, Step
from serve_app.tuning.requests import Ask

COMMAND = "guidellm"

VERSION = "0.8"

START_S = 120.0
"""Seconds that a run may take beyond those of its load, for its start and its report."""

SPARE_DEVIATIONS, SPARE = 6.0, 20
"""Requests beyond the expected ones: in standard deviations of a Poisson number, and more."""

QUICKER = 0.5
"""Time of an answer under load, as a share of that of one alone, for the requests that clients may send."""

WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state"),
    *("family", "group", "problem", "hand", "part", "place", "case", "week", "system", "work", "night"),
)
"""Words of prompts."""


class GuideLLM(Generator):
    """Puts load steps on a service with GuideLLM; a lone client, and batch work, are the own generator's.

    Prompts are random words in place of random tokens: about as many tokens, by the model's own tokenizer. A
    step isn't ended before its time.
    """

    _words_per_token = 0.0
    _lone_s = 0.0

    async def step(
        self, load: Load, *, seconds: float, warm_up: float, drain: float, seed: int, early: bool = False
    ) -> Step:
        """Put a load on the service; see `tuner.Source`.

        Raises:
            ServiceError: GuideLLM isn't installed, fails, or is of another version.
        """
        if load.loop == "closed" and load.value == 1:
            step = await super().step(
                load, seconds=seconds, warm_up=warm_up, drain=drain, seed=seed, early=early
            )
            self._lone_s = min(step.samples["latency"], default=self._lone_s)
            return step
        if not self._words_per_token:
            text = " ".join(WORDS)
            tokens = await self._service.count_tokens(self._requests.model, text)
            self._words_per_token = len(WORDS) / max(1, tokens)
        others = (await self.facts()).in_flight
        began = self._clock()
        with tempfile.TemporaryDirectory(prefix="saturate-guidellm-") as folder:
            report = await self._run(Path(folder), load, warm_up + seconds + drain, seed)
        answers, start, now, late_s = read_report(report, load)
        self.sent += sum(not answer.failed for answer in answers)
        await self._settle(others)
        step = Step.of(
            load,
            self._goals,
            answers,
            (start + warm_up, start + warm_up + seconds),
            began_at=now - (self._clock() - began),
            now=now,
            late_s=late_s,
        )
        if step.seconds < seconds - 1:
            raise ServiceError(
                f"GuideLLM ended after {now - start:.0f} s of {warm_up + seconds:.0f}: it had no more prompts"
            )
        return step

    async def _run(self, folder: Path, load: Load, seconds: float, seed: int) -> JSON:
        """Run GuideLLM; return its report."""
        self._requests.begin(seed)
        data, config, report = folder / "data.jsonl", folder / "config.json", folder / "report.json"
        with data.open("w") as file:
            for _ in range(self._count(load, seconds)):
                file.write(json.dumps(self._row(self._requests.next())) + "\n")
        config.write_text(json.dumps({"spec": self._spec(load, seconds, seed, data, report)}))
        command = shutil.which(COMMAND)
        if command is None:
            raise ServiceError(f"there is no command {COMMAND}; {INSTALL}")
        log = folder / "log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                command,
                "run",
                "--config",
                str(config),
                "--disable-console",
                stdout=output,
                stderr=output,
                # Nothing is asked of a hub: the prompts are here, with their lengths.
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(seconds + START_S):
                    code = await process.wait()
            except TimeoutError:
                raise ServiceError(f"GuideLLM has not ended after {seconds + START_S:.0f} s") from None
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
        if code:
            *_, last = ["no output", *log.read_text(errors="replace").split("\n")[:-1]]
            raise ServiceError(f"GuideLLM failed (exit code {code}): {last.strip()}")
        found: JSON = json.loads(report.read_text())
        return found

    def _spec(self, load: Load, seconds: float, seed: int, data: Path, report: Path) -> JSON:
        backend = {
            "kind": "openai_http",
            "target": self._service.url,
            "model": self._requests.model,
            "request_format": "/v1/completions",
            "extras": {"body": {"temperature": 0, "service_tier": self._requests.tier}},
            "verify": True,
        }
        if authorization := self._service.headers.get("authorization"):
            backend["api_key"] = authorization.removeprefix("Bearer ")
        profile: JSON = (
            {"kind": "poisson", "rate": [load.value], "max_concurrency": self._most}
            if load.loop == "open"
            else {"kind": "concurrent", "streams": [int(load.value)]}
        )
        return {
            "backend": backend,
            "profile": profile,
            "constraints": [{"kind": "max_duration", "seconds": seconds}],
            "data": [{"kind": "json_file", "path": str(data)}],
            "seed": {"kind": "static", "value": seed},
            "outputs": [{"kind": "json", "path": str(report)}],
        }

    def _count(self, load: Load, seconds: float) -> int:
        """Return the number of requests that a load may need: GuideLLM ends when it has sent them."""
        expected = load.value * seconds
        if load.loop == "closed":
            # Under load, answers take longer than alone.
            expected = load.value * (seconds / max(QUICKER * self._lone_s, 1e-3) + 1)
        return math.ceil(expected + SPARE_DEVIATIONS * math.sqrt(expected)) + SPARE

    def _row(self, ask: Ask) -> JSON:
        prompt = ask.body["prompt"]
        if isinstance(prompt, str):
            return {"prompt": prompt, "output_tokens_count": ask.tokens}
        # A word for each token id, so that prompts with a common beginning keep it.
        words = prompt[: max(1, round(len(prompt) * self._words_per_token))]
        text = " ".join(WORDS[token % len(WORDS)] for token in words)
        return {"prompt": text, "prompt_tokens_count": len(prompt), "output_tokens_count": ask.tokens}


INSTALL = (
    f"install GuideLLM {VERSION}, in an environment of its own, since it needs other packages: "
    f"`pipx install 'guidellm=={VERSION}.*'`"
)
"""What to do where the command is missing."""


def check_guidellm() -> None:
    """Raise if there is no GuideLLM.

    Raises:
        ServiceError: There is none.
    """
    if shutil.which(COMMAND) is None:
        raise ServiceError(f"there is no command {COMMAND}; {INSTALL}")


def read_report(report: JSON, load: Load) -> tuple[Sequence[Answer], float, float, float]:
    """Return the answers in a report of GuideLLM.

    Args:
        report: The report.
        load: The load.

    Returns:
        The answers, the begin of the load, its end, all in seconds since the epoch, and the longest time by
        which a request was sent too late.

    Raises:
        ServiceError: The report is of another version, or has no request.
    """
    try:
        (benchmark,) = report["benchmarks"]
        found = [
            (status, request)
            for status in ("successful", "incomplete", "errored")
            for request in benchmark["requests"][status] or ()
        ]
        answers = list(_answers(found, load))
        starts = [request["info"]["scheduler_start_time"] for _, request in found]
        ends = [_last(request["info"]["timings"]) for _, request in found]
        late_s = max((_late_s(request["info"]["timings"]) for _, request in found), default=0.0)
    except (KeyError, TypeError, ValueError) as error:
        version = report.get("metadata", {}).get("guidellm_version", "?")
        raise ServiceError(
            f"GuideLLM {version}: its report has another form than that of {VERSION} ({error!r}); {INSTALL}"
        ) from None
    if not answers:
        raise ServiceError("GuideLLM sent no request")
    return answers, min(starts), max(ends), late_s if load.loop == "open" else 0.0


def _answers(found: Sequence[tuple[str, Any]], load: Load) -> Iterator[Answer]:
    for status, request in found:
        times = request["info"]["timings"]
        sent_at = times["targeted_start"] if load.loop == "open" else times["request_start"]
        if sent_at is None:
            # It was never due.
            continue
        first_at = times["first_token_iteration"]
        if status == "incomplete":
            yield Answer(sent_at, _asked(request), first_at)
            continue
        tokens = request["output_tokens"] or 0
        failed = status == "errored" or first_at is None or not tokens
        yield Answer(sent_at, tokens, first_at, times["request_end"] or times["resolve_end"], failed)


def _asked(request: JSON) -> int:
    """Return the tokens that a request asks for; 1: it wasn't sent."""
    sent = request["request_args"]
    return 1 if sent is None else int(json.loads(sent)["body"]["max_tokens"])


def _last(times: JSON) -> float:
    return float(
        max(value for name in ("request_end", "resolve_end", "targeted_start") if (value := times[name]))
    )


def _late_s(times: JSON) -> float:
    if times["request_start"] is None or times["targeted_start"] is None:
        return 0.0
    return float(times["request_start"] - times["targeted_start"])
