"""Reports of the fusion pass: one candidate per collective, and a table of them."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Candidate:
    """One collective of a graph and its matmuls.

    ``where`` is the line of the user's code and the module, as "model.py:12 (layers.0.w1)".
    ``op`` is what it became, or would have; ``matmuls`` how many of them; ``reason`` why it was left as it
    is, empty if it was fused. Times are predictions, in seconds, None where there was nothing to predict.
    ``notes`` are matmuls that were left out of a fused one, with why.
    """

    collective: str
    where: str
    op: str
    shape: str
    matmuls: int
    fused: bool
    reason: str = ""
    unfused_seconds: float | None = None
    fused_seconds: float | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"{self.collective} {self.shape} at {self.where}"
        times = ""
        if self.unfused_seconds is not None and self.fused_seconds is not None:
            unfused, fused = 1e6 * self.unfused_seconds, 1e6 * self.fused_seconds
            times = f" (predicted {unfused:.0f} us unfused, {fused:.0f} us fused)"
        told = f"{self.op} with {self.matmuls}" if self.fused else f"not fused: {self.reason}"
        return "; ".join([f"{what}: {told}{times}", *self.notes])


@dataclass
class Report:
    """The candidates of one graph, in its order. ``graph``: "forward", "backward" or "inference".

    ``before`` and ``after`` are the graph's code, where someone wants reports.
    """

    graph: str
    candidates: list[Candidate] = field(default_factory=list)
    before: str = ""
    after: str = ""

    @property
    def fused(self) -> list[Candidate]:
        """The candidates that were fused."""
        return [candidate for candidate in self.candidates if candidate.fused]

    def summary(self) -> str:
        """One line."""
        line = f"{self.graph} graph: fused {len(self.fused)} of {len(self.candidates)} collectives"
        counts = sorted(Counter(candidate.op for candidate in self.fused).items())
        if counts:
            line += f" ({', '.join(f'{op} {count}' for op, count in counts)})"
        if left := sorted({each.reason for each in self.candidates if not each.fused}):
            line += "; left: " + ", ".join(left)
        return line

    def __str__(self) -> str:
        return "\n".join([self.summary(), *(f"  {candidate}" for candidate in self.candidates)])
