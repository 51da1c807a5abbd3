"""``explain``: what would be fused in a function, and what not and why, without running it."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from interlace.compile.backend import FusionPass, _aot_eager
from interlace.compile.prediction import Machine
from interlace.compile.report import Candidate, Report


@dataclass(repr=False)
class Explanation:
    """The reports of all graphs of a function, forward and backward. ``str()`` of it is the whole table."""

    reports: list[Report]

    @property
    def candidates(self) -> list[Candidate]:
        """Every collective, in the order of the graphs."""
        return [candidate for report in self.reports for candidate in report.candidates]

    @property
    def fused(self) -> list[Candidate]:
        """The candidates that were fused."""
        return [candidate for candidate in self.candidates if candidate.fused]

    def __str__(self) -> str:
        return "\n".join(map(str, self.reports)) or "no graphs"

    __repr__ = __str__


class _Enough(Exception):
    """Ends the run of a function that was only to be traced."""


def explain(
    function: Callable[..., Any],
    *args: Any,
    policy: str = "auto",
    machine: Machine | None = None,
    **kwargs: Any,
) -> Explanation:
    """Every collective in the compiled graphs of ``function(*args, **kwargs)``: fused, or why not.

    Traces, and runs nothing: no collective starts, and with a GroupSpec no process group is needed. What
    does not compile whole is traced to its first graph break. ``policy``, ``machine``: see FusionPass.

    Raises ValueError for another policy, and what tracing ``function`` raises.

    >>> group = interlace.GroupSpec("tp", 4)
    >>> found = explain(interlace.functional.all_gather, torch.ones(4, 8), group=group)
    >>> [(each.collective, each.shape, each.fused) for each in found.candidates]  # there is no matmul
    [('all_gather', '16x8', False)]
    """
    reports: list[Report] = []
    record = FusionPass(policy, machine, reports.append)

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _aot_eager(graph_module, inputs, record)

        def stop(*_: Any) -> Any:
            raise _Enough

        return stop

    compiled = torch.compile(function, backend=backend)
    now = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with now, contextlib.suppress(_Enough):
        compiled(*args, **kwargs)
    return Explanation(reports)
