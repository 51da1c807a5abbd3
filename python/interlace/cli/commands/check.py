"""``python -m interlace check``: every kernel, at several shapes and world sizes, against float64.

On ``cpu`` the kernels run interpreted in ``sim``; on ``cuda`` the same kernels run compiled, with virtual
ranks on the current GPU. A line per case says how large the worst error was as a share of what the dtypes
allow; the exit code is 0 only if no share exceeds 1, and 3 if only time was missing.
"""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import interlace
from interlace import reference
from interlace.arguments.words import RunPlace
from interlace.cli.output.options import CommandOptions, option, positive_int, seed_number
from interlace.runtime.algorithms.low_latency import MOST_BYTES
from interlace.runtime.tuning import configuration

Variant = tuple[str, dict[str, Any], dict[str, int | bool]]  # name, arguments, configuration
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
LEFT_OUT = 3  # the exit code if all that began have passed
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class CheckOptions(CommandOptions):
    """Run every kernel against float64 references."""

    device: str | None = option(
        None, choices=("cpu", "cuda"), help="default: cuda where there is a GPU"
    )
    seed: int = option(0, type=seed_number, help="of the inputs (default 0)")
    ranks: tuple[int, ...] = option(
        (),
        type=positive_int,
        action="append",
        metavar="N",
        help="only on so many ranks; may be repeated",
    )
    seconds: float | None = option(
        None,
        type=positive_int,
        metavar="S",
        help="begin no case after so many seconds; what is left out is counted",
    )
    json: bool = option(False, action="store_true", help="print JSON")

    def chosen_device(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def interprets(self) -> bool:
        return self.chosen_device() == "cpu"


@dataclass
class CheckCase:
    """One call on every rank: which op, how, and on what."""

    op: str
    variant: str
    world_size: int
    m: int
    n: int
    k: int
    dtype: str
    arguments: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, int | bool] = field(default_factory=dict)

    @property
    def shape(self) -> str:
        if self.op in COLLECTIVES:
            return f"{self.m} elements"
        return f"{self.m} x {self.n} x {self.k}"


@dataclass
class Verdict:
    """``ratio``: worst error over its bound; ``error`` says what was raised instead."""

    case: CheckCase
    ratio: float
    seconds: float
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and self.ratio <= 1


def _random(seed: int, rank: int, *shape: int, dtype: str) -> torch.Tensor:
    """Random numbers, the same on every device and in every place."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(*shape, generator=generator).to(DTYPES[dtype])


def _inputs(case: CheckCase, seed: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(input, weight) of a rank; shards are uneven, weights of an all-gather are the same."""
    if case.op == "all_gather_matmul":
        rows = case.m // case.world_size + (3 * rank) % 7
        shard = _random(seed, rank, rows, case.k, dtype=case.dtype)
        return shard, _random(seed, 99, case.n, case.k, dtype=case.dtype).t()
    if case.op in COLLECTIVES:
        return _random(seed, rank, case.m, dtype=case.dtype), torch.empty(0)
    activations = _random(seed, rank, case.m, case.k, dtype=case.dtype)
    return activations, _random(seed, 50 + rank, case.k, case.n, dtype=case.dtype)


def _bias(case: CheckCase, seed: int) -> torch.Tensor | None:
    return _random(seed, 77, case.n, dtype=case.dtype) if case.arguments.get("bias") else None


def _on_rank(case: CheckCase, seed: int) -> torch.Tensor:
    device, rank = interlace.device(), interlace.get_rank()
    input, weight = (tensor.to(device) for tensor in _inputs(case, seed, rank))
    if case.op in COLLECTIVES:
        return _collective(case, input, rank).cpu()
    bias = _bias(case, seed)
    arguments = {**case.arguments, "bias": None if bias is None else bias.to(device)}
    result: torch.Tensor = getattr(interlace, case.op)(input, weight, **arguments)
    return result.cpu()


def _collective(case: CheckCase, x: torch.Tensor, rank: int) -> torch.Tensor:
    op = getattr(interlace, case.op)
    if case.op == "all_reduce":
        op(x, **case.arguments)
        return x
    if case.op == "all_gather":
        source: Any = x
        count = case.world_size * x.numel()
    else:
        source = [part.contiguous() for part in reference.split(x, case.world_size)]
        count = source[rank].numel()
    output = torch.full((count,), torch.nan, dtype=x.dtype, device=x.device)
    op(output, source, **case.arguments)
    return output


def _expected(case: CheckCase, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(reference, bound) by rank."""
    inputs, weights = zip(*(_inputs(case, seed, r) for r in range(case.world_size)), strict=True)
    dtype, bias = DTYPES[case.dtype], _bias(case, seed)
    reduce_op = case.arguments.get("reduce_op") or case.arguments.get("op") or "sum"
    if case.op == "all_gather_matmul":
        found = reference.all_gather_matmul(inputs, weights[0], dtype, bias=bias, roundings=2)
        return [found] * case.world_size
    if case.op == "all_gather":
        whole = torch.cat(inputs).double()
        return [(whole, torch.zeros_like(whole))] * case.world_size
    if case.op in COLLECTIVES:
        value, bound = reference.reduce(inputs, reduce_op)
    else:
        value, bound = reference.matmul_all_reduce(inputs, weights, dtype, bias, reduce_op)
    if "scatter" not in case.op:
        return [(value, bound)] * case.world_size
    values = reference.split(value, case.world_size)
    return list(zip(values, reference.split(bound, case.world_size), strict=True))


def cases(device: str) -> Iterator[CheckCase]:
    """The cases to check. On a GPU the shapes are large enough for several waves of tiles."""
    shapes = [(96, 80, 64), (61, 45, 37)]
    worlds = (1, 2, 3, 4)
    if device == "cuda":
        shapes = [(2048, 1024, 512), (1000, 520, 264), (61, 45, 37)]
        worlds = (1, 2, 4, 7)
    plain: list[Variant] = [(name, {"algorithm": name}, {}) for name in ("pipelined", "unfused")]
    gather: list[Variant] = [
        ("fused, copiers", {"algorithm": "fused"}, {}),
        ("fused, copy engine", {"algorithm": "fused", "bias": True}, {"copiers": 0}),
        ("fused, pointers", {"algorithm": "fused"}, {"descriptors": False}),
        *plain,
    ]
    average = {"algorithm": "fused", "reduce_op": "avg"}
    reduce: list[Variant] = [
        ("fused", {"algorithm": "fused", "bias": True}, {}),
        ("fused, pointers, avg", average, {"descriptors": False}),
        *plain,
    ]
    fused = {
        "all_gather_matmul": gather,
        "matmul_reduce_scatter": reduce,
        "matmul_all_reduce": reduce,
    }
    dtypes = ("bf16", "fp32", "fp16")
    for world_size, (number, (m, n, k)) in itertools.product(worlds, enumerate(shapes)):
        main_tile = device == "cuda" and number == 0  # others take turns
        for dtype in dtypes if main_tile else (dtypes[(number + world_size) % 3],):
            for op, variants in fused.items():
                for variant, arguments, overrides in variants:
                    yield CheckCase(op, variant, world_size, m, n, k, dtype, arguments, overrides)
            for op in COLLECTIVES:
                for algorithm in ("kernel", "copy", "low_latency"):
                    fits = op != "reduce_scatter" and 28 * m <= MOST_BYTES
                    if fits or algorithm != "low_latency":
                        arguments = {"algorithm": algorithm}
                        yield CheckCase(op, algorithm, world_size, m * 7, 0, 0, dtype, arguments)


def run_case(case: CheckCase, device: str, seed: int) -> Verdict:
    start = time.perf_counter()
    place: RunPlace = "cuda" if device == "cuda" else "sim"
    try:
        with configuration.override(**case.overrides):
            results = interlace.run(_on_rank, case.world_size, case, seed, place=place, seed=seed)
    except Exception as error:
        elapsed = time.perf_counter() - start
        return Verdict(case, float("inf"), elapsed, f"{type(error).__name__}: {error}")
    elapsed = time.perf_counter() - start
    judged = zip(results, _expected(case, seed), strict=True)
    ratio = max(reference.worst_ratio(result, *expected) for result, expected in judged)
    return Verdict(case, ratio, elapsed)


def check(console: Any, options: CheckOptions) -> int:
    """Print a line per case; 0 if all pass, 1 if one fails, LEFT_OUT if only time was missing."""
    device, ranks, seconds = options.chosen_device(), options.ranks, options.seconds
    if device == "cuda" and not torch.cuda.is_available():
        raise interlace.PlaceUnavailableError(
            "check --device cuda needs a CUDA device, and torch sees none; use --device cpu"
        )
    chosen = [case for case in cases(device) if not ranks or case.world_size in ranks]
    if not chosen:
        raise ValueError(f"ranks: check --device {device} has no cases on {sorted(ranks)} ranks")
    verdicts: list[Verdict] = []
    end = time.monotonic() + (float("inf") if seconds is None else seconds)
    for case in chosen:
        if time.monotonic() > end:
            break
        verdict = run_case(case, device, options.seed)
        verdicts.append(verdict)
        if not options.json:
            mark = "[green]pass[/green]" if verdict.passed else "[red]FAIL[/red]"
            console.print(
                f"{mark}  {case.op:<22} {case.variant:<21} W={case.world_size} {case.shape:<17} "
                f"{case.dtype}  {verdict.ratio:5.2f} of bound  {verdict.seconds * 1e3:6.0f} ms"
                + (f"  {verdict.error.splitlines()[0]}" if verdict.error else ""),
                soft_wrap=True,
            )
    failed = [verdict for verdict in verdicts if not verdict.passed]
    left_out = len(chosen) - len(verdicts)
    if options.json:
        document = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "torch": torch.__version__,
            "seed": options.seed,
            "left_out": left_out,
            "cases": [asdict(v) | {"passed": v.passed} for v in verdicts],
        }
        print(json.dumps(document, indent=1))
    else:
        late = f", {left_out} left out after {seconds:g} s" if left_out else ""
        passed = len(verdicts) - len(failed)
        console.print(f"{passed} passed, {len(failed)} failed on {device}{late}")
    return 1 if failed else LEFT_OUT if left_out else 0
