"""Findings of one time are told once in the terminal: the first in full, the others as a line."""

from __future__ import annotations

from typing import Any

import pytest

from tailscope.model import Finding, Party
from tailscope.render.words import same_time


def finding(rule: str, **more: Any) -> Finding:
    return Finding(
        **{
            "rule": rule,
            "status": "found",
            "severity": "high",
            "basis": "inferred",
            "title": "",
            "culprit": Party("class", "<8k"),
            "victims": (),
            "share_of_tail": 0.8,
            "window_ns": (0, 100),
            "evidence": (),
            "claims": "others' prefill",
            "explains": {"<512\tTTFT": 1.0, "<512\tITL": 0.2},
            **more,
        }
    )


FIRST = finding("hol-coupling")


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"explains": {"<512\tTTFT": 0.9}}, True),
        ({"window_ns": None}, True),
        ({"rule": "hol-coupling"}, False),
        ({"claims": "queued for slots or KV cache"}, False),
        ({"claims": ""}, False),
        ({"explains": {"<2k\tTTFT": 0.9}}, False),
        ({"status": "inconclusive"}, False),
        ({"window_ns": (90, 200)}, False),
    ],
)
def test_the_same_time(changes: dict[str, Any], same: bool) -> None:
    assert same_time(finding(**{"rule": "size-ratio", **changes}), FIRST) is same
