"""Causes of races: the run again, with one of the detector's rules off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from interlace.verify.race_check.agents import Rules
from interlace.verify.race_check.findings import Finding
from interlace.verify.race_check.happens_before import Detector


class Several:
    """Detectors that look at the same run by different rules: an observer that tells each of them."""

    def __init__(self, detectors: list[Detector]) -> None:
        self.detectors = detectors

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def tell_all(*arguments: Any, **named: Any) -> Any:
            answers = [getattr(each, name)(*arguments, **named) for each in self.detectors]
            return answers[0]

        return tell_all


CAUSES = (
    (
        "no barrier",
        "call tl.debug_barrier() between the data and the signal",
        Rules(barriers=False),
    ),
    ("narrow scope", 'signal and wait with scope="sys"', Rules(scopes=False)),
    (
        "weak order",
        'signal with sem="release", wait with sem="acquire"',
        Rules(orders=False),
    ),
    (
        "weak order",
        "barrier, release and acquire, or scope: more than one of them is missing",
        Rules(barriers=False, orders=False, scopes=False),
    ),
)


def explain(findings: list[Finding], relaxed: list[Detector]) -> list[Finding]:
    """Findings with the rule that makes them, by what detectors with ``CAUSES``' rules did not find."""
    explained = []
    for finding in findings:
        for (kind, hint, _), detector in zip(CAUSES, relaxed, strict=True):
            if finding.kind != "narrow scope" and finding.key not in detector.found:
                finding = replace(finding, kind=kind, hint=hint)
                break
        explained.append(finding)
    return explained
