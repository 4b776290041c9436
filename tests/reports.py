"""Reports for tests of what shows them: one of a real capture, and one of hostile names."""

from __future__ import annotations

from tailscope.model import (
    Check,
    ClassRow,
    Diagnosis,
    Evidence,
    Finding,
    Objective,
    Party,
    Remedy,
    Severity,
    Trust,
    Verdict,
)

#: What a name in a trace may be, each of them a way out of some kind of text.
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!-- tailscope -->",
    "| a | b |\n| --- | --- |",
    "`code` **bold** _em_ ~~gone~~ $x$",
    "[text](javascript:alert(1)) ![i](http://evil.example/i.png)",
    "@octocat @org/team fixes #1 GH-2 owner/repo#3",
    "https://evil.example/ www.evil.example someone@evil.example :smile:",
    "::error title=x::y\n::stop-commands::z ##[error]w %0A::warning::v",
    "1. one\n- two\n# three\n> four\n    five\n---\n===",
    "\x1b[31mred\x1b[0m \u202eesrever\u2066 \u2028line",
    "&lt;b&gt; &amp;",
    "\\",
)


def hostile(name: str, findings: int = 1) -> Diagnosis:
    """A diagnosis in which every text of a trace is `name`."""
    party = Party("class", name, {name: name, "waits": 1.23456})

    def finding(severity: Severity) -> Finding:
        return Finding(
            rule="hol-coupling",
            status="found",
            severity=severity,
            basis="inferred",
            title=f"Requests of class {name} wait",
            culprit=party,
            victims=(party, party),
            share_of_tail=0.5,
            window_ns=(1_795_963_214_000_000_000, 1_795_963_264_000_000_000),
            evidence=(Evidence(f"{name} TTFT: 1 s of 2 s"), Evidence(name)),
            counter_evidence=(Evidence(name),),
            remedies=(Remedy(f"Send {name} elsewhere", "router", "any", "none"),),
            confirm_by=(f"Remove {name}",),
        )

    row = ClassRow(
        klass=name,
        metric="TTFT",
        observer="engine",
        basis="requests",
        n=100,
        p50_s=0.1,
        excess_s=1.0,
        tail_rule="slowest 10",
        excess={"queue_kv": 1.0},
        objectives=(Objective("p99", 1.0, 3, 100, "broken"),),
    )
    return Diagnosis(
        trace={
            "path": name,
            "first_ns": 1_795_963_214_000_000_000,
            "last_ns": 1_795_963_264_000_000_000,
            "rows": {"requests": 100},
            "requests": 100,
            "steps": 10,
            "warnings": [name],
            "blame": [
                {"victim": name, "culprit": culprit, "request_seconds": 1.0} for culprit in (name, "<512")
            ],
            "tenants": [
                {
                    "id": name,
                    "members": 1,
                    "n": 10,
                    "failed": 0,
                    "share_of_tokens": 0.5,
                    "ttft": {"p50_s": 1.0, "p95_s": None, "p99_s": None},
                    "e2e": {"p50_s": 1.0, "p95_s": None, "p99_s": None},
                }
            ]
            * 2,
        },
        verdict=Verdict(f"Requests of class {name} wait.", "found", 0.5),
        classes=(row,),
        checks=(Check("hol-coupling", "found", name),),
        findings=tuple(finding("high") for _ in range(findings)),
        trust=(Trust("join-coverage", "fail", name),),
        missing=(name,),
    )
