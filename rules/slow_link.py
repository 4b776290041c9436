"""Transfers take longer than others of their size, or all wait for one rank's link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from scipy import stats

from tailscope.model import (
    Decision,
    Evidence,
    Finding,
    Party,
    Remedy,
    Rows,
    Rule,
    Threshold,
)
from tailscope.units import ms

from ._ranks import HEALTHY, MATCHED, SHARE, by_window, unfit, unprofiled, unsure
from ._tails import part_of, severity_by

Row = Mapping[str, Any]


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    return by_window(rows, lambda window: window_decision(window, limits), RULE.missing)


def window_decision(rows: Sequence[Row], limits: Mapping[str, float]) -> Decision:
    """What one window of profiles says."""
    window = rows[0]
    if window["present"] < 2 and window["world_size"] == 1:
        return Decision("clear", "one rank: no link")
    if window["no_link"]:
        return Decision(
            "clear", "the ranks' processes are on one host and speak by gloo: there is no link between them"
        )
    if not window["steps"]:
        if window["missing"]:
            return Decision(
                "inconclusive",
                f"profiles of {window['present']} of {window['world_size']} ranks: no transfer is known",
            )
        return Decision("no-data", RULE.missing)
    if window["steps"] < limits["steps"]:
        return Decision("inconclusive", f"{window['steps']} steps are too few to know a usual transfer")
    if unfitting := unfit(window, limits["matched"]):
        return unfitting
    by_rank = [r for r in rows if r["rank"] is not None]
    of_kind = [list(some) for _, some in groupby(by_rank, key=lambda r: (r["rank_group"], r["rank_kind"]))]
    links = [found for some in of_kind if (found := of_ranks(some, limits))]
    slow = [found for r in rows if r["rank"] is None and r["rounds"] and (found := of_group(r, limits))]
    # A group whose transfers are slow because one of its links is is that link's.
    findings = links or slow
    if findings:
        return Decision("found", "; ".join(f.title for f in findings[:2]), tuple(findings))
    if window["missing"]:
        return Decision(
            "inconclusive",
            f"profiles of {window['present']} of {window['world_size']} ranks: what looks like a transfer may be a wait for another",
        )
    for oddest in map(odd_of, of_kind):
        if oddest.matters(limits):
            return Decision("inconclusive", unclear(oddest, limits))
    if undecided := unsure(window, limits["healthy"], "all links"):
        return undecided
    if not by_rank and window["by_ends"]:
        return Decision(
            "clear",
            "no transfer took longer than others of its size; which rank leaves late cannot be told, since the ends set the clocks",
        )
    return Decision("clear", "no transfer took longer than others of its size, and no rank leaves late")


@dataclass(frozen=True)
class Odd:
    """Of a group's ranks the one that leaves its exchanges of a kind farthest from the others: after them (`late`) or before, so in
    `same_way` of its steps, which has a `chance` of so much; what the steps are longer for it."""

    row: Row
    late: bool
    same_way: int
    chance: float
    cost_ns: float
    share: float

    @property
    def errors(self) -> float:
        """How many times the clocks' error it is."""
        return float(abs(self.row["exit_ns"]) / max(self.row["error_ns"], 1.0))

    def matters(self, limits: Mapping[str, float]) -> bool:
        """Whether that is no chance, and costs something, as far as the clocks tell."""
        return (
            self.chance < limits["chance"]
            and self.same_way >= limits["always"] * self.row["steps_told"]
            # Unless it surely costs less than is worth telling: so much of it is open as of how late it leaves.
            and self.errors > 1
            and self.share * (1 + 1 / self.errors) >= limits["share"]
        )


def odd_of(rows: Sequence[Row]) -> Odd:
    # Of two, one is as late as the other is early.
    odd = max(rows, key=lambda r: r["exit_ns"] if len(rows) == 2 else abs(r["exit_ns"]))
    late = odd["exit_ns"] > 0
    same_way = odd["steps_late"] if late else odd["steps_told"] - odd["steps_late"]
    # It is the oddest of so many, one way or the other.
    chance = min(1.0, 2 * len(rows) * float(stats.binom.sf(same_way - 1, odd["steps_told"], 0.5)))
    cost = odd["saved_ns"] or 0
    share = cost / odd["as_left_ns"] if odd["as_left_ns"] else 0.0
    return Odd(odd, late, same_way, chance, cost, share)


def of_ranks(rows: Sequence[Row], limits: Mapping[str, float]) -> Finding | None:
    """One rank of a group that leaves its exchanges of a kind at another time than the others, step after step."""
    oddest, pair = odd_of(rows), len(rows) == 2
    odd, late, same_way, chance = oddest.row, oddest.late, oddest.same_way, oddest.chance
    cost, share = oddest.cost_ns, oddest.share
    if oddest.errors <= limits["errors"] or not oddest.matters(limits):
        return None
    rank, others = odd["rank"], [r["rank"] for r in rows if r["rank"] != odd["rank"]]
    if pair:
        link, what = f"{others[0]}→{rank}", f"what rank {others[0]} sends to rank {rank}"
    elif late:
        link, what = f"→{rank}", f"what rank {rank} receives"
    else:
        link, what = f"{rank}→", f"what rank {rank} sends"
    evidence = [
        Evidence(
            f"in {same_way} of {odd['steps_told']} steps rank {rank} leaves the {odd['rank_kind']}s "
            f"{'after' if late else 'before'} the others, by {ms(abs(odd['exit_ns']))} each "
            f"(by chance in half of them; p = {chance:.2g}); two clocks together are known to {ms(odd['error_ns'])}",
            {"exit_ns": odd["exit_ns"], "steps": same_way, "steps_told": odd["steps_told"], "p": chance},
        ),
        Evidence(
            f"that costs {ms(cost)} of {ms(odd['as_left_ns'])} of steps ({share:.0%})",
            {"cost_ns": cost, "as_left_ns": odd["as_left_ns"]},
        ),
    ]
    counter = []
    if late and not pair:
        counter.append(
            Evidence(
                "ends do not tell a slow receiver from one slow pair: which sender it waits for is not in the profile"
            )
        )
    return finding(
        odd,
        link,
        f"Rank {rank} comes late because {what} is slow" if late else f"All wait for {what}",
        others,
        share,
        evidence,
        counter,
    )


def unclear(oddest: Odd, limits: Mapping[str, float]) -> str:
    """That clocks are not known well enough to say whose link it is."""
    return (
        f"rank {oddest.row['rank']} leaves the {oddest.row['rank_kind']}s {'after' if oddest.late else 'before'} the others by "
        f"{ms(abs(oddest.row['exit_ns']))}, which may cost {oddest.share:.0%} of the steps' time; two clocks together are known to "
        f"{ms(oddest.row['error_ns'])}, and a link needs {limits['errors']:g} times that"
    )


def of_group(row: Row, limits: Mapping[str, float]) -> Finding | None:
    """A group whose transfers take longer than they do at other times, or than those of groups beside it."""
    ranks = ", ".join(str(r) for r in row["members"][:8])
    if (
        row["slow_ns"]
        and row["slow_steps"] >= limits["times"]
        and row["slow_ns"] >= limits["most"] * row["slowest_ns"]
    ):
        cost, often = row["together_ns"], "at times"
        text = (
            f"{row['slow_rounds']} of {row['rounds']} transfers, in {row['slow_steps']} of {row['steps']} steps, took longer than "
            f"others of their kind and size: a {row['kind']} {ms(row['slow_transfer_ns'])} instead of {ms(row['usual_ns'])}"
        )
    elif row["over_siblings_ns"] and row["own_ns"] >= limits["slower"] * row["sibling_ns"]:
        cost, often = row["over_siblings_ns"], "always"
        text = (
            f"the {row['siblings']} groups beside it take {ms(row['sibling_ns'])} for collectives of the same kind and size, "
            f"this one {ms(row['own_ns'])}"
        )
    else:
        return None
    share = cost / row["replayed_ns"]
    in_them = share * row["steps"] / row["together_steps"] if often == "at times" else share
    if share < limits["share"] and in_them < limits["felt"]:
        return None
    evidence = [
        Evidence(text, {"cost_ns": cost}),
        Evidence(
            f"that is {'with all other groups ' if cost != row['slow_ns'] and often == 'at times' else ''}{ms(cost)} of {ms(row['replayed_ns'])} of steps ({share:.0%})",
            {"cost_ns": cost, "replayed_ns": row["replayed_ns"]},
        ),
        Evidence("a transfer is the shortest stay of all ranks: no wait for a late rank is in it"),
    ]
    title = f"Transfers among ranks {ranks} are slow {often}"
    return finding(row, ranks, title, list(row["members"]), share, evidence, [])


def finding(
    row: Row,
    link: str,
    title: str,
    waiting: Sequence[int],
    share: float,
    evidence: list[Evidence],
    counter: list[Evidence],
) -> Finding:
    # Only what a transfer took beyond the usual is in a bill as that; who waits for a link waits for a rank, to the ledger.
    part = (row["slow_ns"] or 0) / row["all_slow_ns"] if row["rank"] is None and row["all_slow_ns"] else 0.0
    tail = part_of(row, part)
    victims = [Party("rank", str(rank)) for rank in waiting[:8]]
    if tail:
        victims.append(tail.victim)
        evidence.append(tail.evidence("slow transfer"))
    counter += unprofiled(row)
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_by(share, tail),
        basis="measured",
        title=title,
        culprit=Party("link", link, {"world": row["world"]}),
        victims=tuple(victims),
        share_of_tail=tail.share if tail else None,
        window_ns=(row["first_ns"], row["last_ns"]),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=RULE.remedies,
        confirm_by=RULE.confirm_by,
        explains=tail.explains if tail else {},
        standing=share,
    )


RULE = Rule(
    name="slow-link",
    summary="Transfers take longer than others of their size, or all wait for one rank's link.",
    why=(
        "A rank that comes late and a link that is slow look alike in a profile: both are long collectives. The first is mended at "
        "the rank, the second at a cable, a switch or a NIC; the shortest stay of all ranks tells them apart."
    ),
    needs=("profiles",),
    missing="needs torch profiler traces of at least two ranks of one world at one time",
    thresholds=(
        MATCHED,
        HEALTHY,
        Threshold(
            "errors", 3, "x", "Below three times the clocks' error nothing is known of who left first."
        ),
        Threshold(
            "chance", 0.01, "p", "A rank leaves last in so many steps by chance once in a hundred windows."
        ),
        Threshold(
            "always", 0.8, "0-1", "A link that is slow is so in nearly all steps; noise changes sides."
        ),
        Threshold("steps", 8, "", "With fewer steps no transfer is known to be usual."),
        Threshold("times", 3, "", "A transfer beyond five deviations in three steps is no chance."),
        SHARE,
        Threshold(
            "felt",
            0.15,
            "0-1",
            "Steps that are a seventh longer are felt by the tail, though there be few of them.",
        ),
        Threshold(
            "most",
            0.5,
            "x",
            "Of groups that are slow at times those are named that are so by half as much as the slowest.",
        ),
        Threshold("slower", 1.5, "x", "Groups on other links of one machine were seen to differ by a fifth."),
    ),
    remedies=(
        Remedy(
            "Look at the link: NVLink and NIC error counters, retransmissions, PCIe width, congestion from other jobs",
            "nvidia-smi nvlink -e; ethtool -S; perfquery; nvidia-smi -q -d PCIE",
            "any",
            "none",
        ),
        Remedy(
            "See which path NCCL took and whether it fell back from NVLink or RDMA to sockets",
            "NCCL_DEBUG=INFO, NCCL_TOPO_DUMP_FILE",
            "NCCL, all versions",
            "a restart, a larger log",
        ),
        Remedy(
            "Keep what talks most within the fast domain: tensor parallelism in a host, experts' exchange over as few hops as can be",
            "--tensor-parallel-size, --data-parallel-size, --all2all-backend",
            "vLLM, all versions",
            "a restart, other memory use per rank",
        ),
        Remedy(
            "Take the host or NIC out and start the ranks elsewhere",
            "NCCL_IB_HCA, the scheduler's drain",
            "any",
            "a restart, a spare host",
        ),
    ),
    confirm_by=(
        "Run nccl-tests between the same ranks while the server is idle: a slow link is slow there too",
        "Swap the rank to another host: lateness that stays with the port is the link's",
    ),
    decide=decide,
    dashboard="ranks",
)
