"""The options of ``interlace bench``, and the requests that they stand for."""

import itertools
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from interlace.benchmark.subjects import baselines
from interlace.benchmark.subjects.by_rows import ByRows
from interlace.benchmark.subjects.plain import Plain
from interlace.benchmark.subjects.requests import DTYPES, OPS, BenchRequest, loaded
from interlace.benchmark.timing import kernel
from interlace.benchmark.timing.sizes import parse_sizes
from interlace.cli.output.machine import refuse_size
from interlace.cli.output.options import MOST, CommandOptions, option
from interlace.launcher import JOB_PLACES
from interlace.launcher import PLACES as OWN_PLACES
from interlace.runtime.compat import launchers
from interlace.runtime.core.place import MOST_SECONDS

PLACES = (*OWN_PLACES, *JOB_PLACES)  # these only with torchrun
GPU_PLACES = ("cuda", "nvshmem")
DEFAULT_SHAPE = "1024"
MOST_RANKS = 64

UNITS = """\
columns:
  time      microseconds per call: the median over blocks of calls; +- half the distance between quartiles
  algbw     size / time, in GB/s = 10**9 bytes/s; the size is that of the op's largest buffer on a rank
  busbw     algbw times nccl-tests' factor: 2(W-1)/W for all_reduce; (W-1)/W for all_gather, reduce_scatter,
            all_to_all, gather and scatter; 1 for broadcast, reduce and send_recv; on W ranks
  TFLOP/s   2 m n k / time of one rank's matmul, in 10**12/s
  overlap   (T_matmul + T_communication - T_fused) / min(T_matmul, T_communication), all of this run
  x NAME    how many times as fast as that baseline
  result    right, or WRONG with the largest error as a multiple of what the dtypes allow

baselines:
  gloo      torch.distributed and torch.mm, on a CPU       nccl      the same on GPUs, one per process
  symm_mem  torch's symmetric memory, on GPUs              torch     copies, sums and torch.mm on one
                                                                     rank alone; nobody waits
exit status: 0; 1 if a result is wrong; 2 for options that cannot be, and errors.
"""


@dataclass(frozen=True)
class BenchOptions(CommandOptions):
    """Time an op of interlace, or a kernel of your own, against baselines, and check every result.

    OP is a collective (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather,
    scatter, send_recv, barrier), a fused op (all_gather_matmul, matmul_reduce_scatter,
    matmul_all_reduce, the last two also as ..._norm, with residual and RMSNorm; all_reduce_norm,
    reduce_scatter_norm, and gather_normed, which is the last with an all-gather; all_to_all_grouped_matmul,
    all_gather_grouped_matmul, grouped_matmul_combine; dispatch, combine;
    matmul_all_to_all, all_to_all_matmul; context_parallel_attention, the same as ..._backward;
    distributed_decode), or path/to/file.py::function,
    which returns an interlace.benchmark.Kernel, or a callable to time.

    Under torchrun its processes are the ranks:  torchrun --nproc-per-node 8 -m interlace bench all_reduce
    """

    epilog = UNITS

    target: str = option(
        positional=True, metavar="OP|FILE.py::FUNCTION", help="what is timed, as said above"
    )
    sizes: str | None = option(
        None,
        metavar="1K:1G:x4",
        help="bytes, of collectives: a list of sizes and of ranges first:last:xFACTOR or "
        f"first:last:+STEP; K, M, G are 2**10, 2**20, 2**30 (default {Plain.defaults['nbytes']})",
    )
    m: str | None = option(
        None, metavar="ROWS", help="of fused ops: all rows; a list or range like --sizes"
    )
    n: str | None = option(
        None,
        metavar="COLUMNS",
        help="of fused ops: columns of a rank's weight; of attention: heads",
    )
    k: str | None = option(
        None,
        metavar="INNER",
        help="of fused ops: what a rank contracts; of attention: a head's size",
    )
    batch: int | None = option(None, type=int, help="of attention: sequences (default 1)")
    key_heads: int | None = option(
        None, type=int, help="of attention: heads of keys, which divide N (default N)"
    )
    mask: str | None = option(
        None, choices=("causal", "full"), help="of attention over a sequence (default causal)"
    )
    dtype: str | None = option(
        None, choices=DTYPES, help="default bfloat16 on a GPU, float32 on a CPU"
    )
    world_size: int | None = option(
        None, type=int, also="--ranks", help="ranks (default 2; torchrun has its own)"
    )
    place: str | None = option(
        None,
        choices=PLACES,
        help="sim: simulated ranks, whose times are those of the simulator; shm: processes on this host; "
        "cuda: virtual ranks on one GPU (default: cuda where there is a GPU, else shm). With torchrun, "
        "where its ranks have to be",
    )
    algorithm: str | None = option(
        None,
        metavar="NAME,...|all",
        help="auto; of fused ops fused, pipelined, unfused; of attention behind a method, as 'ring fused'; "
        "of all_reduce, all_gather and reduce_scatter kernel, copy. all leaves out Triton kernels where "
        "they would be interpreted (default auto)",
    )
    baseline: str | None = option(
        None,
        metavar="NAME,...|none",
        help="torch, nccl, gloo, symm_mem, or those of your Kernel (default what fits the place: gloo on a "
        "CPU, nccl on GPUs, torch for virtual ranks, none in sim)",
    )
    repetitions: int = option(15, type=int, help="blocks per candidate and size (default 15)")
    timeout: float = option(600.0, type=float, help="seconds for one size (default 600)")
    json: str | None = option(None, metavar="FILE", help="write everything that was measured")
    plot: str | None = option(
        None, metavar="FILE", help="a plot, PNG or SVG (needs matplotlib); - draws it here"
    )

    def interprets(self) -> bool:
        return place_of(self) not in GPU_PLACES


def under_torchrun() -> bool:
    """Whether this process is a rank of torchrun or another launcher, whose variables are then torchrun's.

    Raises what :func:`interlace.launched` does.
    """
    if "RANK" not in os.environ and launchers.variables(os.environ).get("WORLD_SIZE", "1") == "1":
        return False  # a shell of srun --pty is no rank
    return launchers.launched()


def place_of(options: BenchOptions) -> str:
    """The place of the ranks, as far as the options say."""
    return options.place or ("cuda" if torch.cuda.is_available() else "shm")


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def requests_of(options: BenchOptions) -> list[BenchRequest]:
    """A request per size. Raises ValueError for what does not fit together."""
    target = options.target
    if "::" not in target and target not in OPS:
        known = ", ".join(OPS)
        raise ValueError(f"{target}: is none of {known}, and not path/to/file.py::function")
    if not 1 <= options.repetitions <= MOST:
        raise ValueError(
            f"--repetitions must be positive, got {options.repetitions}; the most is {MOST}"
        )
    if not 0 < options.timeout <= MOST_SECONDS:
        raise ValueError(
            f"--timeout must be positive, got {options.timeout}; the most is {MOST_SECONDS:g} s"
        )
    on_gpu = place_of(options) in GPU_PLACES
    request = BenchRequest(
        target,
        options.dtype or ("bfloat16" if on_gpu else "float32"),
        _algorithms(options),
        () if options.baseline == "none" else _names(options.baseline),
        options.repetitions,
        virtual=on_gpu and not under_torchrun(),
    )
    _check_place(options, request)
    world_size = world_size_of(options)
    settings = _settings(options)
    requests = [replace(request, settings=settings, **size) for size in _shapes(options)]
    for each in requests:
        if each.own:
            kernel.arguments_for(loaded(target), target, each.arguments)
        else:
            kind = OPS[target]
            kind.refuse(world_size, each.m, each.dtype)
            if issubclass(kind, ByRows):
                kind.refuse_widths(world_size, each.n or 0, each.k or 0)
                kind.refuse_settings(each.n or 0, **dict(settings))
            if not under_torchrun():
                _refuse_size(each, world_size, place_of(options))
    return requests


def _refuse_size(request: BenchRequest, world_size: int, place: str) -> None:
    """Raise ValueError if there is no memory for the tensors of all ranks."""
    kind = OPS[request.target]
    if request.nbytes is not None:
        refuse_size(f"--sizes {request.nbytes}", request.nbytes, world_size, place)
    elif issubclass(kind, ByRows):
        sizes = [getattr(request, size) for size in kind.sizes]
        nbytes = kind.elements(*sizes, **dict(request.settings)) * DTYPES[request.dtype].itemsize
        refuse_size(" x ".join(map(str, sizes)), nbytes, world_size, place)


def _check_place(options: BenchOptions, request: BenchRequest) -> None:
    """Check that the place is there and has the baselines, as far as is known before ranks have met."""
    place, has_gpu = place_of(options), torch.cuda.is_available()
    if place not in OWN_PLACES and not under_torchrun():
        raise ValueError(f"--place {place} is one of torchrun's: start bench with it")
    if place in GPU_PLACES and not has_gpu:
        raise ValueError(f"--place {place} needs a CUDA device, torch sees none; use shm or sim")
    for name in () if request.own else request.chosen or ():
        if under_torchrun():
            device = "cuda" if has_gpu and name != "gloo" else "cpu"
        else:
            device = "cuda" if request.virtual else "cpu"
        baselines.refuse(name, place, device, virtual=request.virtual)


def world_size_of(options: Any) -> int:
    """The number of ranks. Raises ValueError for one that cannot be."""
    given = options.world_size
    if under_torchrun():
        actual = int(os.environ["WORLD_SIZE"])
        if given is not None and given != actual:
            raise ValueError(f"--world-size {given}: torchrun has started {actual} ranks")
        return actual
    if given is not None and not 1 <= given <= MOST_RANKS:
        raise ValueError(f"--world-size must be within 1..{MOST_RANKS}, got {given}")
    return given or 2


def _algorithms(options: BenchOptions) -> tuple[str, ...]:
    if "::" in options.target:
        if options.algorithm is not None:
            raise ValueError(f"--algorithm {options.algorithm}: a kernel of your own has none")
        return ()
    known = OPS[options.target].algorithms
    names = _names(options.algorithm) or ("auto",)
    for name in names:
        if name not in known and names != ("all",):
            raise ValueError(
                f"--algorithm {name}: {options.target} has {', '.join(known)}, and all"
            )
    return names


def _settings(options: BenchOptions) -> tuple[tuple[str, int | str], ...]:
    """What is given besides sizes, as the op's class takes it."""
    kind = OPS.get(options.target)
    known = kind.settings if kind is not None and issubclass(kind, ByRows) else ()
    found: list[tuple[str, int | str]] = []
    for name in ("batch", "key_heads", "mask"):
        value = getattr(options, name)
        if value is None:
            continue
        option = f"--{name.replace('_', '-')} {value}"
        if name not in known:
            raise ValueError(f"{option}: {options.target} has none")
        if value != "full" and value != "causal" and not 1 <= value <= MOST:
            raise ValueError(f"{option} must be positive; the most is {MOST}")
        found.append((name, value))
    return tuple(found)


def _shapes(options: BenchOptions) -> list[dict[str, Any]]:
    """The sizes, as fields of a request."""
    given = {"m": options.m, "n": options.n, "k": options.k, "nbytes": options.sizes}
    kind = OPS.get(options.target)  # None for a kernel of one's own
    lists = {}
    for name, text in given.items():
        option = "--sizes" if name == "nbytes" else f"--{name}"
        if kind is not None and name in kind.sizes and text is None:
            text = kind.defaults.get(name, DEFAULT_SHAPE)
        elif kind is not None and name not in kind.sizes and text is not None:
            raise ValueError(f"{option}: {options.target} {kind.without}")
        if text is not None:
            lists[name] = parse_sizes(text, option)
    return [dict(zip(lists, each, strict=True)) for each in itertools.product(*lists.values())]
