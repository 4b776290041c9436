"""Text in alerting rules: names are hostile, and stand in PromQL, in Prometheus's templates and in what is pasted into a shell."""

from __future__ import annotations

import json
import shlex

#: What to run where the rules themselves are out of date, or tailscope is not well.
MAKE_AGAIN = "tailscope alerts --config tailscope.toml -o rules.yaml"
READY = "curl -s http://127.0.0.1:9464/readyz   # where tailscope serve runs"


def go_string(text: str) -> str:
    """A string of PromQL or of a template, which are Go's; JSON's escapes are among those. What is not printed is escaped,
    as YAML would take some of it for the end of a line, and so is `$`, which begins the name of a threshold."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() and c != "$" else f"\\U{ord(c):08x}" for c in quoted)


def escaped(text: str) -> str:
    """Text in a template that is shown as it is."""
    return text.replace("{", '{{"{"}}')


def quoted_in_shell(label: str) -> str:
    """Template of a label's value as one word of a shell, whatever it holds."""
    return f"'{{{{ reReplaceAll \"'\" \"'\\\\''\" {label} }}}}'"


def run(trace: str, last: str, rule: str | None, narrowed: bool) -> str:
    """Template of the commands that say what is behind an alert; `narrowed` to its class, or its engine, where it is of one."""
    command = escaped(f"tailscope diagnose {shlex.quote(trace)} --last {last}")
    if narrowed:
        # `all` is everybody's objective, no class to look at.
        command += '{{ with $labels.class }}{{ if ne . "all" }} --class ' + quoted_in_shell(".")
        command += (
            "{{ end }}{{ end }}{{ with $labels.server }} --instance " + quoted_in_shell(".") + "{{ end }}"
        )
    return command + (escaped(f"; tailscope rules {shlex.quote(rule)}") if rule else "")
