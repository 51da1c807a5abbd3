"""Causes of races: the run again, with one of the detector's rules off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from interlace.runtime.scheduler.observer import Observer
from interlace.verify.race_check.agents import Rules
from interlace.verify.race_check.findings import Finding
from interlace.verify.race_check.happens_before import Detector


class Several(Observer):
    """Detectors that look at the same run by different rules."""

    know: Callable[..., None]
    new: Callable[..., None]
    touch: Callable[..., None]

    def __init__(self, detectors: list[Detector]) -> None:
        self.detectors = detectors


def _to_all(name: str) -> Callable[..., None]:
    def forward(self: Several, *arguments: Any, **named: Any) -> None:
        for detector in self.detectors:
            getattr(detector, name)(*arguments, **named)

    return forward


_OBSERVED = [name for name in vars(Observer) if name.startswith("on_") or name == "attach"]
for _name in (*_OBSERVED, "know", "new", "touch"):
    setattr(Several, _name, _to_all(_name))


CAUSES = (
    (
        "no barrier",
        Rules(barriers=False),
        "call tl.debug_barrier() between the data and the signal",
    ),
    ("narrow scope", Rules(scopes=False), 'signal and wait with scope="sys"'),
    ("weak order", Rules(orders=False), 'signal with sem="release", wait with sem="acquire"'),
    (
        "weak order",
        Rules(barriers=False, orders=False, scopes=False),
        "barrier, release and acquire, or scope: more than one of them is missing",
    ),
)


def explain(findings: list[Finding], relaxed: list[Detector]) -> list[Finding]:
    """Findings with the rule that makes them, by what detectors with ``CAUSES``' rules did not find."""
    explained = []
    for finding in findings:
        for (kind, _, hint), detector in zip(CAUSES, relaxed, strict=True):
            if finding.kind != "narrow scope" and finding.key not in detector.found:
                finding = replace(finding, kind=kind, hint=hint)
                break
        explained.append(finding)
    return explained
