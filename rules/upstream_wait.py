"""The tail that clients see is made before the engine: in a gateway's queue, a client's pool, the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailscope.model import Decision, Evidence, Finding, Party, Remedy, Rows, Rule, Threshold, severity_of

from . import _tails

Row = Mapping[str, Any]


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    odd = [r for r in rows if (r["longer"] or 0) > limits["odd"] * r["n"]]
    if len(odd) == len(rows):
        worst = max(odd, key=lambda r: r["longer"] / r["n"])
        return Decision(
            "inconclusive",
            f"{worst['longer']:,} of {worst['n']:,} requests lasted longer for the engine than for who waited for them: "
            "their ids may be those of others",
        )
    sound = [r for r in rows if r not in odd]
    hurt = [r for r in sound if matters(r, limits)]
    standing = [r for r in sound if stands(r, limits)]
    if not hurt and standing:
        title = "all requests of a class wait before the engine"
        return Decision("found", title, (for_all(standing),))
    if not hurt:
        most = max((share(r) for r in rows if r not in odd and r["excess_s"]), default=0.0)
        return Decision(
            "clear", f"at most {most:.0%} of what clients see of a tail is made before the engine"
        )
    hurt.sort(key=share, reverse=True)
    return Decision("found", "clients wait before the engine has their requests", (finding(hurt, limits),))


def seconds(row: Row) -> float:
    """Of the excess, what lies before the engine. A first token that comes late, and the next ones at once, makes no longer
    answer: no more than what whole latencies are apart."""
    parts = row["gateway_s"] + row["network_s"] + row["upstream_s"]
    return float(min(parts, max(0.0, row["tail_gap_s"] - row["typical_gap_s"])))


def share(row: Row) -> float:
    return _tails.share_of(seconds(row), row["excess_s"]) if row["excess_s"] else 0.0


def matters(row: Row, limits: Mapping[str, float]) -> bool:
    if not row["excess_s"] or row["excess_s"] <= 0:
        return False
    return share(row) >= limits["share"] and seconds(row) >= limits["slowdown"] * (row["p50_s"] or 0.0)


def is_limited(row: Row, limits: Mapping[str, float]) -> bool:
    """Whether those who come late come when the engines have as many as ever: somebody lets no more through."""
    return bool(
        (row["delayed"] or 0) >= limits["delayed"] and (row["at_most_share"] or 0.0) >= limits["at_most"]
    )


def stands(row: Row, limits: Mapping[str, float]) -> bool:
    """Whether a queue is never empty, so that all wait alike and no tail stands out. A long way is no queue."""
    waits = row["typical_gap_s"] >= limits["standing"] * (row["p50_s"] or 0.0)
    return bool(row["metric"] == "TTFT" and waits and is_limited(row, limits))


def for_all(standing: Sequence[Row]) -> Finding:
    worst = max(standing, key=lambda r: r["typical_gap_s"] / r["p50_s"])
    most = worst["most_in_flight"]
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(worst["typical_gap_s"] / worst["p50_s"], any(r["slo_broken"] for r in standing)),
        basis="measured",
        title=f"All requests wait before the engine: no more than {most:,} are let in at once",
        culprit=Party(
            "process", "gateway" if worst["with_gateway"] else "in-flight limit", {"requests": most}
        ),
        victims=victims(standing),
        share_of_tail=None,
        window_ns=None if worst["first_ns"] is None else (worst["first_ns"], worst["last_ns"]),
        evidence=(
            Evidence(
                f"typically {worst['typical_gap_s']:.3g} s of {worst['p50_s']:.3g} s TTFT of class {worst['klass']} as the "
                f"{worst['observer']} saw it is not the engine's",
                {key: worst[key] for key in ("typical_gap_s", "p50_s")},
            ),
            limit_evidence(worst),
            *lost_evidence(worst),
        ),
        counter_evidence=(
            Evidence("all wait alike: the tail is no longer than usual by this, the whole latency is"),
            *against(worst),
        ),
        remedies=tuple(remedies(worst, True)),
        confirm_by=RULE.confirm_by,
    )


def limit_evidence(row: Row) -> Evidence:
    return Evidence(
        f"{row['at_most_share']:.0%} of the {row['delayed']:,} delayed requests came to the engines when these had "
        f"{row['delayed_in_flight']:.0f} requests (median), and they never had more than {row['most_in_flight']:,}: "
        "a limit on requests in flight",
        {k: row[k] for k in ("delayed", "delayed_in_flight", "most_in_flight", "at_most_share")},
    )


def lost_evidence(row: Row) -> list[Evidence]:
    if not row["refused"] and not row["left_early"]:
        return []
    text = f"{row['refused']:,} requests were refused and {row['left_early']:,} given up that no engine saw"
    return [Evidence(text, {"refused": row["refused"], "left_early": row["left_early"]})]


def finding(hurt: Sequence[Row], limits: Mapping[str, float]) -> Finding:
    """`hurt`: the classes and metrics it is felt in, the worst first."""
    worst = hurt[0]
    limited = is_limited(worst, limits)
    culprit, where, title = told(worst, limited)
    evidence = [
        Evidence(
            f"{r['klass']} {r['metric']} as the {r['observer']} saw it: {seconds(r):.3g} s of {r['excess_s']:.3g} s excess "
            f"({r['tail_rule']}) is {where}",
            {key: r[key] for key in ("klass", "metric", "gateway_s", "network_s", "upstream_s", "excess_s")},
        )
        for r in hurt[:6]
    ]
    evidence.append(
        Evidence(
            f"typically {worst['typical_gap_s']:.3g} s, in the tail {worst['tail_gap_s']:.3g} s of a request's time is not the "
            f"engine's ({worst['klass']} {worst['metric']})",
            {key: worst[key] for key in ("typical_gap_s", "tail_gap_s")},
        )
    )
    if limited:
        evidence.append(limit_evidence(worst))
    if worst["way_in_share"] is not None:
        evidence.append(
            Evidence(
                f"{worst['way_in_share']:.0%} of the delayed requests' time before the engine is on the way in, the rest on the "
                "answer's way back",
                {"way_in_share": worst["way_in_share"]},
            )
        )
    evidence += lost_evidence(worst)
    # Where the p99 is withheld the sentence is about these requests, not about the service.
    quantile = "p99" if worst["p99_s"] is not None else "99 % point of these requests' "
    quantile = f"{quantile} {worst['metric']}".replace("  ", " ")
    evidence.append(
        Evidence(
            f"with this time at its typical length the {quantile} of class {worst['klass']} would be "
            f"{worst['calm_p99_s']:.3g} s; as the engine measures it, it is {worst['engine_p99_s']:.3g} s",
            {"calm_p99_s": worst["calm_p99_s"], "engine_p99_s": worst["engine_p99_s"]},
        )
    )
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(share(worst), any(r["slo_broken"] for r in hurt)),
        basis="measured",
        title=title,
        culprit=culprit,
        victims=victims(hurt),
        share_of_tail=share(worst),
        window_ns=None if worst["first_ns"] is None else (worst["first_ns"], worst["last_ns"]),
        evidence=tuple(evidence),
        counter_evidence=tuple(against(worst)),
        remedies=tuple(remedies(worst, limited)),
        confirm_by=RULE.confirm_by,
        explains={f"{r['klass']}\t{r['metric']}\t{r['observer']}": seconds(r) for r in hurt},
    )


def told(row: Row, limited: bool) -> tuple[Party, str, str]:
    """Who it is, where the time is spent, and the title, as far as the views tell."""
    if row["gateway_s"] >= max(row["network_s"], row["upstream_s"]):
        return Party("process", "gateway"), "spent in the gateway", "Requests wait in the gateway"
    if row["network_s"] >= row["upstream_s"]:
        return (
            Party("link", "client to gateway"),
            "between client and gateway",
            "Requests are slow on their way between client and gateway",
        )
    if limited:
        most = row["most_in_flight"]
        return (
            Party("process", "in-flight limit", {"requests": most}),
            "between client and engine",
            f"Requests wait before the engine: no more than {most:,} are let in at once",
        )
    return (
        Party("link", "client to engine"),
        "between client and engine",
        "Requests lose time between client and engine",
    )


def victims(hurt: Sequence[Row]) -> tuple[Party, ...]:
    worst = {row["klass"]: row for row in reversed(hurt)}
    return tuple(
        Party("class", name, {"metric": worst[name]["metric"], "seen_by": worst[name]["observer"]})
        for name in dict.fromkeys(row["klass"] for row in hurt)
    )


def against(row: Row) -> list[Evidence]:
    found = []
    if row["most_running"] is not None:
        of = f" of {row['max_num_seqs']}" if row["max_num_seqs"] else ""
        kv = "" if row["most_kv"] is None else f", KV cache up to {row['most_kv']:.0%} full"
        found.append(
            Evidence(
                f"the engine itself ran up to {row['most_running']:.0f}{of} requests with up to {row['most_waiting'] or 0:.0f} waiting{kv}: "
                "what is let in sooner waits there if it has no room",
                {key: row[key] for key in ("most_running", "most_waiting", "most_kv", "max_num_seqs")},
            )
        )
    if not row["with_gateway"]:
        found.append(
            Evidence(
                "no gateway's view: the client's own pool, the network, a proxy and the API server's accepting of requests are "
                "not told apart"
            )
        )
    elif row["observer"] == "gateway":
        found.append(Evidence("no client's view: what happens before the gateway is not known"))
    return found


def remedies(row: Row, limited: bool) -> list[Remedy]:
    """What helps where the time is spent, least invasive first."""
    limit, way, server, room = RULE.remedies
    if row["gateway_s"] >= max(row["network_s"], row["upstream_s"]) or limited:
        return [limit, room]
    return [way, limit, server]


RULE = Rule(
    name="upstream-wait",
    summary="The tail that clients see is made before the engine.",
    why=(
        "The engine's clock starts when its API server has the request. Time in a gateway's queue, a client's connection "
        "pool or the network is in no metric of the engine, which looks healthy."
    ),
    needs=("client_rows",),
    missing="needs requests as a client or gateway saw them beside the engine's view, joined by id",
    thresholds=(
        _tails.SHARE,
        Threshold(
            "slowdown", 0.25, "x p50", "A tail slower by less than a quarter of the median is not felt."
        ),
        Threshold(
            "odd",
            0.1,
            "0-1",
            "Where more requests last longer for the engine than for its client, rows of different requests are joined.",
        ),
        Threshold(
            "standing",
            0.5,
            "x p50",
            "Where all wait alike no tail stands out; most of the latency is still nobody's work.",
        ),
        Threshold("delayed", 10, "", "Fewer delayed requests say nothing of a limit."),
        Threshold(
            "at_most",
            0.7,
            "0-1",
            "Under a limit nearly all that wait come when it is reached; without one few arrivals meet the maximum.",
        ),
    ),
    remedies=(
        Remedy(
            "Raise the limit on requests in flight where they wait: the gateway's, or the client's pool",
            "Envoy circuit_breakers.thresholds max_requests and max_connections; aiohttp TCPConnector(limit), httpx Limits(max_connections)",
            "by default 1024 in Envoy, 100 in aiohttp and httpx",
            "More requests are in the engine at once: each token gap is longer, and its KV cache may fill",
        ),
        Remedy(
            "Look at what lies between client and server: packet loss, proxies that buffer, TLS handshakes of new connections",
            "keep-alive in the client; proxy_buffering off in nginx",
            "any",
            "none of the engine's",
        ),
        Remedy(
            "Let more processes accept and answer requests, where the API server itself is busy",
            "--api-server-count, for example 2",
            "vLLM 0.9 and later",
            "CPU cores and memory; statistics are spread over the processes",
        ),
        Remedy(
            "Add an instance, so that the same limit holds fewer back",
            "router configuration",
            "any",
            "another GPU",
        ),
    ),
    confirm_by=(
        "Raise the limit for ten minutes: the client's p99 falls to the engine's, while the engine's own rises less",
        "Compare the gateway's count of requests in flight and queued with vllm:num_requests_running and vllm:num_requests_waiting",
    ),
    decide=decide,
)
