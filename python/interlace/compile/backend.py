"""``torch.compile(..., backend="interlace")``: Inductor, or eager aten, with the fusion pass.

:func:`explain` reports what the pass would fuse in a function, and why not the rest, without running it.
"""

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from interlace.compile.fusion import Candidate, Machine, Pattern, Report, check_options, fuse
from interlace.compile.graph_nodes import AnyGraph, graph_of
from interlace.compile.norms import keep_sums, know_eps

log = logging.getLogger("interlace.compile")
CODEGENS = ("inductor", "aot_eager")
OWN_OPTIONS = ("policy", "machine", "on_report", "patterns")


class FusionPass(CustomGraphPass):
    """A pass that fuses collectives with matmuls. Inductor's option is ``"post_grad_custom_post_pass"``.

    ``policy``: "auto" fuses if that is predicted to be faster, "always" fuses all it can, "never" nothing.
    ``machine`` replaces the prediction's numbers. ``on_report`` is called with the Report of every graph.
    The log of "interlace.compile" has one line for every graph. ``patterns``: your own rewrites, as
    :class:`Pattern` objects.

    Raises ValueError or TypeError as :func:`fuse` does. It is a pass for ``torch.fx`` graphs:

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> def layer(x, weight):
    ...     return interlace.functional.all_gather(x, group=interlace.GroupSpec("tp", 4)) @ weight
    >>> graph = make_fx(layer, tracing_mode="fake")(torch.ones(4, 8), torch.ones(8, 2)).graph
    >>> FusionPass("never", on_report=lambda report: print(report.summary()))(graph)
    inference graph: fused 0 of 1 collectives; left: policy is "never"
    """

    def __init__(
        self,
        policy: str = "auto",
        machine: Machine | None = None,
        on_report: Callable[[Report], None] | None = None,
        patterns: Sequence[Pattern] = (),
    ) -> None:
        check_options(policy, machine, patterns)
        self.policy, self.machine, self.on_report = policy, machine, on_report
        self.patterns = tuple(patterns)

    def __call__(self, program: AnyGraph) -> None:
        graph = graph_of(program)
        before = "" if self.on_report is None else code_of(graph)
        report = fuse(
            program,
            policy=self.policy,
            machine=self.machine,
            name=graph_kind(graph),
            patterns=self.patterns,
        )
        log.info("interlace: %s", report.summary())
        if self.on_report is not None:
            report.before, report.after = before, code_of(graph)
            self.on_report(report)

    def uuid(self) -> object:
        """Return a key of the pass's effect on a graph, for Inductor's cache; None to cache nothing.

        It is None with ``on_report``, or with patterns, whose code is unknown.
        """
        if self.on_report is not None or self.patterns:
            return None
        return _sources(), self.policy, repr(self.machine)


class _SumsKept(CustomGraphPass):
    """Run :func:`norms.keep_sums` on the graph of forward and backward, before it is partitioned."""

    def __init__(self, policy: str) -> None:
        self.policy = policy

    def __call__(self, graph: fx.Graph) -> None:
        if self.policy != "never":
            keep_sums(graph)

    def uuid(self) -> object:
        return _sources(), self.policy


@functools.cache
def _sources() -> bytes:
    """Return a hash of all code that decides about a graph: of the pass, and of the ops' lowerings."""
    here = Path(__file__).parent
    lowerings = here.parent / "ops" / "library.py"
    return get_hash_for_files((*map(str, sorted(here.glob("*.py"))), str(lowerings)))


def code_of(graph: fx.Graph) -> str:
    """Return the graph as Python, one op per line."""
    code = graph.python_code("self").src.strip()
    return "\n".join(line.split(";")[0].rstrip() for line in code.splitlines())


def graph_kind(graph: fx.Graph) -> str:
    """Return "backward" for graphs with tangents, "forward" for those that save tensors for a backward."""
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    if any(name.startswith("tangents") for name in names):
        return "backward"
    return "forward" if any(name.startswith("primals") for name in names) else "inference"


def backend(
    graph_module: fx.GraphModule,
    inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph, called by ``torch.compile(backend="interlace")``. ``options``:

    ``codegen``: "inductor" (default), or "aot_eager", which runs the ops one by one. ``policy``,
    ``machine``, ``on_report``, ``patterns``: see :class:`FusionPass`. All others are Inductor's.
    """
    settings = dict(options or {})
    codegen = settings.pop("codegen", "inductor")
    of_pass = {key: settings.pop(key) for key in OWN_OPTIONS if key in settings}
    if codegen not in CODEGENS:
        raise ValueError(f"codegen must be one of {', '.join(CODEGENS)}, got {codegen!r}")
    fusion = FusionPass(**of_pass)
    if fusion.policy != "never":
        know_eps(graph_module.graph)
    if codegen == "inductor":
        return _inductor(graph_module, inputs, fusion, mode, settings)
    if unknown := settings or mode:
        raise ValueError(f'codegen="aot_eager" accepts no options of Inductor, got {unknown}')
    return _aot_eager(graph_module, inputs, fusion)


def _inductor(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    fusion: FusionPass,
    mode: str | None,
    settings: dict[str, object],
) -> Callable[..., Any]:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = dict(list_mode_options(mode)) if mode not in (None, "default") else {}
    patches.update(settings)
    new_passes = {
        "post_grad_custom_post_pass": fusion,
        "joint_custom_post_pass": _SumsKept(fusion.policy),
    }
    for key, new_pass in new_passes.items():
        theirs = patches.get(key) or []
        passes = theirs if isinstance(theirs, list) else [theirs]
        patches[key] = _Passes([*passes, new_pass]) if passes else new_pass
    compiled: Any = compile_fx(graph_module, inputs, config_patches=patches)
    return compiled  # type: ignore[no-any-return]


class _Passes(CustomGraphPass):
    def __init__(self, passes: list[Any]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> object:
        identities = [each.uuid() if hasattr(each, "uuid") else None for each in self.passes]
        return None if any(identity is None for identity in identities) else str(identities)


def _aot_eager(
    graph_module: fx.GraphModule, inputs: Sequence[object], fusion: FusionPass
) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
    from torch._inductor.decomposition import select_decomp_table

    def compiler(traced: fx.GraphModule, _: Sequence[object]) -> object:
        traced = copy.deepcopy(traced)
        fusion(traced.graph)
        traced.recompile()
        return make_boxed_func(traced.forward)

    from torch._functorch.partitioners import min_cut_rematerialization_partition

    kept = _SumsKept(fusion.policy)

    def partition(joint: fx.GraphModule, *args: Any, **options: Any) -> Any:
        kept(joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **options)

    make = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=select_decomp_table,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return make(graph_module, inputs)


def register() -> None:
    """Register the backend "interlace" with torch.compile; an entry point calls this without an import."""
    from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

    if "interlace" not in _COMPILER_FNS:
        register_backend(compiler_fn=backend, name="interlace")


@dataclass(repr=False)
class Explanation:
    """The reports of all graphs of a function, forward and backward. ``str()`` gives the whole table."""

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
    """An exception that ends the run of a function after its trace."""


def explain(
    function: Callable[..., object],
    *args: object,
    policy: str = "auto",
    machine: Machine | None = None,
    **kwargs: object,
) -> Explanation:
    """Report every collective in the compiled graphs of ``function(*args, **kwargs)``: fused, or why not.

    The function is traced but not run: no collective starts, and a GroupSpec needs no process group. If the
    function does not compile as one graph, it is traced up to its first graph break. ``policy``,
    ``machine``: see FusionPass.

    Raises ValueError for another policy, and all errors from tracing ``function``.

    >>> group = interlace.GroupSpec("tp", 4)
    >>> found = explain(interlace.functional.all_gather, torch.ones(4, 8), group=group)
    >>> [(each.collective, each.shape, each.fused) for each in found.candidates]  # there is no matmul
    [('all_gather', '16x8', False)]
    """
    reports: list[Report] = []
    record = FusionPass(policy, machine, reports.append)

    def backend(graph_module: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        _aot_eager(graph_module, inputs, record)

        def stop(*_: object) -> object:
            raise _Enough

        return stop

    compiled = torch.compile(function, backend=backend)
    now = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with now, contextlib.suppress(_Enough):
        compiled(*args, **kwargs)
    return Explanation(reports)
