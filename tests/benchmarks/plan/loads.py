"""Loads: lengths, and rates as shares of what a replica can do by arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.simulation.profiles import Profile
from serve_app.tuning.fleet import ReplicaSettings
from serve_app.tuning.planning import full_rate
from serve_app.tuning.workload import TokenLengths, Workload


@dataclass(frozen=True, slots=True)
class Case:
    """Lengths of the requests.

    Attributes:
        name: Name on the command line.
        input: Tokens of a prompt.
        output: Tokens of an answer, and its `max_tokens`.
    """

    name: str
    input: TokenLengths
    output: TokenLengths

    def workload(self, rate: float) -> Workload:
        """Return the requests at a rate; each reserves as much as a mean answer has."""
        return Workload(rate, self.input, self.output, round(self.output.expected))


def case(name: str, input: str, output: str, most: int = 0) -> Case:
    """Return a case from lengths as on a command line, with answers of at most `most` tokens."""
    answers = TokenLengths.parse(output)
    return Case(name, TokenLengths.parse(input), answers.cut(most) if most else answers)


# An l4-7b takes three minutes for the longest of 1,000 answers.
LONG = case("long", "1500:800", "300:200", most=600)

CASES: Mapping[str, Sequence[Case]] = {
    "l4-7b": (case("short", "512:256", "128:64"), LONG),
    # With prompts of 512 tokens, 90% would be 32 requests and 4,000 tokens per second, which fill two cores.
    "h100-8b": (case("short", "1024:512", "128:64"), LONG),
}
"""Cases by device."""


@dataclass(frozen=True, slots=True)
class Level:
    """Requests at a rate.

    Attributes:
        case: Their lengths.
        load: Their rate, as a share of what a replica can do, 0 to 1.
        workload: The requests, with their rate.
    """

    case: Case
    load: float
    workload: Workload

    @property
    def name(self) -> str:
        """Name in tables: the case and the load."""
        return f"{self.case.name}, {self.load:.0%}"

    def __str__(self) -> str:
        return (
            f"{self.case.input} in, {self.case.output} out; {self.load:.0%} of what a replica can do, "
            f"{self.workload.rate:.3g} requests/s"
        )


def levels(profile: Profile, case: Case, shares: Sequence[float], most: float) -> list[Level]:
    """Return the levels of a case.

    Args:
        profile: The device.
        case: The lengths.
        shares: Shares of what a replica can do, 0 to 1.
        most: Most requests per second; shares that mean more become one level with this rate.
    """
    full = full_rate(profile, case.workload(1.0), ReplicaSettings.of(profile))
    return [
        Level(case, rate / full, case.workload(rate))
        for rate in sorted({min(share * full, most) for share in shares})
    ]
