"""What steps cost the classes' tails: rows of a query summed up, for rules about steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailscope.model import Decision, Evidence, Party, Severity, Threshold, severity_of

Row = Mapping[str, Any]

#: What findings of several rules may explain: `claims` of a finding, so that the same time is not added up.
WAITING, OTHERS_PREFILL, BEYOND_BATCH = "waiting for ranks", "others' prefill", "beyond the batch"
QUEUED, LEFT_OUT = "queued for slots or KV cache", "running without tokens"

SHARE = Threshold("share", 0.1, "0-1", "A tenth of the excess: what causes less is not why the tail is long.")
SLOWDOWN = Threshold(
    "slowdown", 0.1, "x p50", "A tail slower by less than a tenth of the median is not felt."
)


def share_of(seconds: float, excess_s: float) -> float:
    """What `seconds` of an excess are of it, 0-1."""
    return float(min(1.0, max(0.0, seconds / excess_s)))


@dataclass(frozen=True)
class Tail:
    """A class and metric, the seconds of its excess that are due to something, and all of the excess."""

    klass: str
    metric: str
    seconds: float
    excess_s: float
    slo_broken: bool
    p50_s: float | None

    def is_felt(self, share: float, slowdown: float) -> bool:
        """Whether it is a real part of an excess, and that part long enough, in medians, to be felt."""
        return self.share >= share and self.seconds >= slowdown * (self.p50_s or 0.0)

    @property
    def share(self) -> float:
        return share_of(self.seconds, self.excess_s)


@dataclass(frozen=True)
class Part:
    """The part of a class's tail that a finding explains, where the whole component is told of in a row (`component_tails`)."""

    klass: str
    metric: str
    seconds: float
    excess_s: float
    slo_broken: bool
    tail_rule: str

    @property
    def share(self) -> float:
        return self.seconds / self.excess_s

    @property
    def victim(self) -> Party:
        return Party("class", self.klass, {"metric": self.metric})

    @property
    def explains(self) -> dict[str, float]:
        return {f"{self.klass}\t{self.metric}": self.seconds}

    def evidence(self, what: str) -> Evidence:
        text = f"{self.klass} {self.metric}: {self.seconds:.3g} s of {self.excess_s:.3g} s excess ({self.tail_rule}) is {what}"
        return Evidence(text, {"seconds": self.seconds, "excess_s": self.excess_s})


def part_of(row: Row, share: float) -> Part | None:
    """`share` of a component's seconds in the tail that it is most of; None where there are none."""
    if not row["excess_s"] or not row["component_s"] or not share:
        return None
    seconds = min(row["excess_s"], row["component_s"] * min(1.0, share))
    return Part(
        row["tail_class"],
        row["tail_metric"],
        seconds,
        row["excess_s"],
        bool(row["slo_broken"]),
        row["tail_rule"],
    )


def severity_by(share: float, part: Part | None) -> Severity:
    """By the share of the steps' time that something cost, or of a class's tail, whichever is more."""
    return severity_of(max(share, part.share if part else 0.0), bool(part and part.slo_broken))


def tails(hurt: Iterable[Sequence[Row] | None], classes: Sequence[Row] | None) -> list[Tail]:
    """The tails by share, the most hurt first. `hurt`: of each step {klass, metric, seconds}; `classes`: {klass, metric,
    excess_s, p50_s, slo_broken} of those that have an excess."""
    seconds: dict[tuple[str, str], float] = {}
    for row in (row for rows in hurt for row in rows or ()):
        key = row["klass"], row["metric"]
        seconds[key] = seconds.get(key, 0.0) + row["seconds"]
    found = [
        Tail(
            c["klass"],
            c["metric"],
            seconds[c["klass"], c["metric"]],
            c["excess_s"],
            bool(c["slo_broken"]),
            c["p50_s"],
        )
        for c in classes or ()
        if (c["klass"], c["metric"]) in seconds
    ]
    return sorted(found, key=lambda tail: -tail.share)


def felt(hurt: Iterable[Tail], share: float, slowdown: float) -> list[Tail]:
    """Those of which it is a real part that is long enough to be felt."""
    return [tail for tail in hurt if tail.is_felt(share, slowdown)]


def unknown_cost(lane: Row) -> Decision | None:
    """What is said of engines of which it is not known what their batches take; None where it is."""
    if lane["usable"] is None:
        return Decision("no-data", f"{counted(lane['steps'], 'step')}: too few to know what a step takes")
    if not lane["usable"]:
        return Decision("inconclusive", "what steps take does not follow their batches")
    return None


def severity(hurt: Sequence[Tail]) -> Severity:
    """`hurt`: the tails of which it is a real part, the worst first."""
    return severity_of(hurt[0].share if hurt else None, any(tail.slo_broken for tail in hurt))


def victims(hurt: Sequence[Tail]) -> tuple[Party, ...]:
    """Each class once, with the metric it is hurt most in."""
    worst = {tail.klass: tail for tail in reversed(hurt)}
    names = dict.fromkeys(tail.klass for tail in hurt)
    return tuple(Party("class", name, {"metric": worst[name].metric}) for name in names)


def explains(hurt: Sequence[Tail]) -> dict[str, float]:
    return {f"{tail.klass}\t{tail.metric}": tail.seconds for tail in hurt}


def sentence(hurt: Sequence[Tail], what: str) -> str:
    """In which tails it is."""
    parts = (
        f"{tail.seconds:.3g} s of the {tail.excess_s:.3g} s {tail.metric} excess of class {tail.klass}"
        for tail in hurt[:3]
    )
    return f"{what}: {', '.join(parts)}"


def counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


def rounded(number: float) -> str:
    """A large number to three digits, as 12,600."""
    return f"{float(f'{number:.3g}'):,.0f}"


def engines_name(row: Row) -> str:
    """How engines that step together are called: by the one of most steps, and how many are with it."""
    others = len(row["engines"]) - 1
    name = f"Engine {engine_name(row)}"
    return name if not others else f"{name} and the {counted(others, 'engine')} in step with it"


def engine_name(row: Row) -> str:
    """How an engine is called: by its number, and by its instance where there are several."""
    number = "" if row["engine"] is None else str(row["engine"])
    if row["instances"] > 1 or not number:
        return f"{row['instance']}/{number}" if number else str(row["instance"])
    return number
