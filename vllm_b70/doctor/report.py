"""All findings in order, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_b70.doctor.finding import Finding, Severity

#: Exit status by the worst finding.
STATUS = {Severity.ok: 0, Severity.note: 0, Severity.warning: 1, Severity.error: 2}


def examine(model: Path | None, users: int, depth: int, tokens: int, cards: int) -> list[Finding]:
    """Run every group of checks.

    Args:
        model: A checkpoint's folder, or None to leave memory out.
        users: Requests at once.
        depth: Drafts a step.
        tokens: Tokens of a request.
        cards: Tensor parallel size.
    """

    def groups() -> Iterator[Iterator[Finding]]:
        from vllm_b70.doctor import devices, environment, memory, plugin, software

        yield software.check()
        yield devices.check(cards)
        yield environment.check(devices.kind())
        yield plugin.check()
        if model is not None:
            yield memory.check(model, memory.Load(users, depth, tokens, cards))

    return [finding for group in groups() for finding in group]


def worst(findings: list[Finding]) -> Severity:
    """The worst severity among them."""
    return max((finding.severity for finding in findings), key=lambda s: s.rank)


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {"worst": worst(findings), "findings": [vars(finding) for finding in findings]}


def as_table(findings: list[Finding]) -> Any:
    """A rich table, groups apart."""
    from rich.table import Table

    colours = dict(zip(Severity, ("green", "cyan", "yellow", "red"), strict=True))
    table = Table("", "what", "found, and what to do", show_edge=False)
    group = findings[0].group if findings else ""
    for finding in findings:
        if finding.group != group:
            table.add_section()
        group = finding.group
        text = finding.found + (f"\n→ {finding.remedy}" if finding.remedy else "")
        mark = f"[{colours[finding.severity]}]{finding.severity}[/]"
        table.add_row(mark, finding.what, text.replace("[", r"\["))
    return table
