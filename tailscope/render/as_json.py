"""A diagnosis as JSON: the documented, versioned contract between tailscope and other programs."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import orjson

from tailscope.model import ClassRow, Diagnosis, Evidence, Finding, Party

#: Control and bidirectional characters beyond ASCII.
CONTROLS = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
#: Raised when a key is removed or changes its meaning; new keys do not raise it.
SCHEMA_VERSION = 1


def schema() -> dict[str, Any]:
    """The JSON schema (2020-12) that `render` keeps."""
    parsed: dict[str, Any] = orjson.loads(files("tailscope").joinpath("diagnosis.schema.json").read_bytes())
    return parsed


def render(diagnosis: Diagnosis) -> str:
    return dumps(as_dict(diagnosis))


def dumps(document: dict[str, Any]) -> str:
    """JSON of a document of plain values that a terminal may show."""
    text = orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()
    # JSON leaves them as they are, and a terminal would obey them.
    return CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    document = {
        "schema_version": SCHEMA_VERSION,
        "trace": diagnosis.trace,
        "verdict": asdict(diagnosis.verdict),
        "classes": [_class_row(row) for row in diagnosis.classes],
        "checks": [asdict(check) for check in diagnosis.checks],
        "findings": [_finding(finding) for finding in diagnosis.findings],
        "trust": [asdict(entry) for entry in diagnosis.trust],
        "missing": list(diagnosis.missing),
    }
    cleaned: dict[str, Any] = plain(document)
    return cleaned


def _class_row(row: ClassRow) -> dict[str, Any]:
    values = asdict(row)
    values["class"] = values.pop("klass")
    values["slo_broken"] = row.slo_broken
    return values


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "status": finding.status,
        "severity": finding.severity,
        "basis": finding.basis,
        "title": finding.title,
        "culprit": _party(finding.culprit),
        "victims": [_party(victim) for victim in finding.victims],
        "share_of_tail": finding.share_of_tail,
        "window_ns": finding.window_ns,
        "evidence": [_evidence(entry) for entry in finding.evidence],
        "counter_evidence": [_evidence(entry) for entry in finding.counter_evidence],
        "remedies": [asdict(remedy) for remedy in finding.remedies],
        "confirm_by": list(finding.confirm_by),
    }


def _party(party: Party) -> dict[str, Any]:
    return {"kind": party.kind, "id": party.id, **party.detail}


def _evidence(evidence: Evidence) -> dict[str, Any]:
    return {"text": evidence.text, "data": dict(evidence.data)}


def plain(value: Any) -> Any:
    """Tuples as lists, numbers of NumPy and Decimal as Python's, NaN and infinities as null."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
