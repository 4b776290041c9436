"""What alerts of several rules have in common."""

from __future__ import annotations

from tailscope.model import Alert, Signal, Threshold

WINDOW = "[5m]"
#: Requests that a vLLM engine finished, a second.
FINISHED = f"sum without (finished_reason) (rate(vllm:request_success_total{WINDOW}))"
#: Requests that wait for room in the engine, without those that wait for something else where that is told apart.
WAITING = (
    f'sum without (reason) (avg_over_time(vllm:num_requests_waiting_by_reason{{reason="capacity"}}{WINDOW}))'
)
#: The same before vLLM 0.20.2.
ALL_WAITING = f"avg_over_time(vllm:num_requests_waiting{WINDOW})"

QUEUED = Threshold(
    "queued", 1, "requests", "Less than one on average is a queue that comes and goes within seconds."
)


def found(name: str, rule: str, summary: str) -> Alert:
    """That the diagnosis of `tailscope serve` has an open finding of the rule that is high: a large part of a class's
    tail, or an SLO broken by it. It decides, with all of its evidence; the alert adds nothing."""
    expr = f'max by (rule, culprit, victim) (tailscope_finding{{rule="{rule}",severity="high"}})'
    who = "culprit {{ $labels.culprit }}, victim {{ $labels.victim }}"
    return Alert(name, "warning", "2m", f"{summary}: {who}", (Signal(expr, "> 0"),))


def is_found(rule: str) -> str:
    """Guard: the diagnosis has an open finding of the rule, of whatever severity."""
    return f'and on () (max(tailscope_finding{{rule="{rule}"}}) > 0)'
