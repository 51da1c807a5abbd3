"""Targets of ``interlace verify``: every op with every algorithm, and the kernels that streams use.

Ops whose name begins with "nodes." run on several nodes, two ranks to a node. A target is an SPMD function
that has a few calls of an op in flight. So workspaces and slots are used again while some rank may be far
behind. Tiles are small, so that a few elements make several tiles, programs and chunks. Arguments are the
op's examples, algorithms are its record's, and ``Op.reference`` returns the right results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import interlace
from interlace.groups.groups import default_group
from interlace.kernels import signal, slots
from interlace.kernels.tiling import split_rows
from interlace.ops.attention.decode import decode
from interlace.ops.attention.problem import HEAD, HEADS, KEY_HEADS, example_queries
from interlace.ops.experts.dispatch import dispatch_rows
from interlace.ops.library import BY_NAME, IN_PLACE, OPS
from interlace.ops.matmul.formats import FORMATS
from interlace.ops.matmul.norms import kernel_makes_fp8
from interlace.ops.op.op import Example, Op, Setting, constant, finish
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import peers_of
from interlace.runtime.places.sim.place import separate_nodes
from interlace.runtime.tuning import configuration

CALLS = 4
SMALL_TILES: dict[str, int | bool] = {
    "block_m": 16,
    "block_n": 16,
    "block_k": 16,
    "block_elements": 16,
    "programs": 2,
    "copy_rows": 4,
}
INNER = 8
WIDE = 160  # numbers along k of block-scaled operands: more than the 128 of one step
MANY = 300  # more words than a program of kernels/collectives/low_latency.py takes
ROUNDINGS = 2.0**-16  # times the largest number: more than fp32 roundings, less than whole numbers
Tensor = torch.Tensor


@dataclass(frozen=True)
class VerifyTarget:
    """``variants`` by algorithm, ``quick`` (None: all) for a quick check; ``kernels`` to lint."""

    variants: dict[str, Callable[[], Any]]
    kernels: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None

    def checked(self, quick: bool) -> dict[str, Callable[[], Any]]:
        if not quick or self.quick is None:
            return self.variants
        return {name: self.variants[name] for name in self.quick}


RowCounts = Callable[[int, int], Sequence[int]]
Finish = Callable[[], Sequence[Tensor]]
"""Waits for the results of an op."""
Begin = Callable[[Op, Communicator, Any, str], Finish]
"""Starts an op, with the record of its arguments, and the algorithm if that is not an argument."""


def _begin(op: Op, group: Communicator, record: Any, algorithm: str) -> Finish:
    started = op.start(group, record)
    return lambda: finish(started)


@dataclass(frozen=True)
class TargetCalls:
    """How a target calls an op.

    ``rows``: each rank's, by the number of ranks and the number of the call. ``width``: of matrices, by the
    number of ranks. ``examples``: arguments that differ from the op's own. ``tiles``: values of the
    configuration, by the same two numbers. ``stand_in``: the op to call, if it is another. ``algorithms``:
    the ones to run, if they differ from the op's. ``otherwise``: differing arguments, by algorithm;
    ``second``: arguments of every second call; ``asks_for``: the algorithm for a name that is not one.
    ``kernels``: additional kernels.
    """

    rows: RowCounts = lambda size, call: [17] * size
    width: Callable[[int], int] = lambda size: INNER
    examples: Mapping[str, Example] = field(default_factory=dict)
    tiles: Callable[[int, int], Mapping[str, int | bool]] = lambda size, call: {}
    begin: Begin = _begin
    stand_in: str = ""
    algorithms: Sequence[str] = ()
    otherwise: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    second: Mapping[str, Any] = field(default_factory=dict)
    asks_for: str = ""
    kernels: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None

    def start(self, op: Op, group: Communicator, number: int, algorithm: str) -> Callable[[], bool]:
        """Start a call; return a function that waits for it, and returns whether its results are right."""
        op = BY_NAME[self.stand_in] if self.stand_in else op
        op = replace(op, examples={**op.examples, **self.examples})
        rank, size = group.rank, group.world_size
        rows, width = tuple(self.rows(size, number)), self.width(size)
        setting = Setting(rank, size, call=number, rows=rows, width=width)
        method, _, word = (self.asks_for or algorithm).rpartition(" ")
        records = op.example_records(setting, method=method, algorithm=word)
        right = op.reference(records, size)[rank]
        with configuration.override(**self.tiles(size, number)):
            end = self.begin(op, group, records[rank], word)
        return lambda: all(_same(*each) for each in zip(end(), right, strict=True))


def _same(result: Tensor, right: Tensor) -> bool:
    """Return whether numbers are equal except for roundings, which whole numbers do not have."""
    share = max(ROUNDINGS, torch.finfo(result.dtype).eps) if result.is_floating_point() else 0.0
    result, right = result.double(), right.double()
    most = right.nan_to_num(neginf=0.0).abs().max() if right.numel() else 0.0
    return result.shape == right.shape and torch.allclose(
        result, right, rtol=0, atol=share * float(most)
    )


def _in_flight(group: Communicator, op: Op, calls: TargetCalls, count: int, algorithm: str) -> None:
    calls, started = replace(calls, **calls.otherwise.get(algorithm, {})), []
    for number in range(count):
        calls_of = replace(calls, **calls.second) if number % 2 else calls
        started.append(calls_of.start(op, group, number, algorithm))
        # In some ops only rank 0 waits for data: the other ranks do not learn how far the others are.
        one = torch.ones(1, 4), torch.ones(4, 1)
        interlace.matmul_reduce_scatter(*one, group=group, algorithm="fused", async_op=True)
    for number, is_right in enumerate(started):
        if not is_right():
            raise AssertionError(f"wrong result on rank {group.rank} in call {number}")


def _algorithms(op: Op, calls: TargetCalls) -> dict[str, Callable[[], Any]]:
    def variant(algorithm: str) -> Callable[[], Any]:
        def on_rank() -> None:
            with configuration.override(**SMALL_TILES):
                _in_flight(default_group(), op, calls, CALLS, algorithm)

        return on_rank

    return {name: variant(name) for name in calls.algorithms or op.algorithms}


def _over_nodes(op: Op, calls: TargetCalls, algorithm: str) -> dict[str, Callable[[], Any]]:
    """Return the variants of a target with two ranks to a node; puts store at once, or late."""

    def variant(put: str) -> Callable[[], Any]:
        def on_rank() -> None:
            world_size = interlace.get_world_size()
            each = 2 if world_size > 2 else 1
            ranks = tuple(range(world_size))
            place = default_group().place.subgroup(ranks, 1)
            group = Communicator(separate_nodes(place, [r // each for r in ranks], put), ranks)
            with configuration.override(**SMALL_TILES, copiers=2, chunks=2):
                _in_flight(group, op, calls, CALLS - 1, algorithm)

        return on_rank

    return {f"{put} puts": variant(put) for put in ("stores", "late")}


# -- ops that are started in other ways -------------------------------------------------------------


def _begin_eager(op: Op, group: Communicator, record: Any, algorithm: str) -> Finish:
    """Start a plain collective, whose algorithm only eager calls choose."""
    output = record.input.clone() if op.name in IN_PLACE else op.outputs(record, group.world_size)
    tensors = [output] if op.name in IN_PLACE else [output, record.input]
    root = {"src": record.src} if "src" in op.kinds else {}
    options = {"group": group, "algorithm": algorithm, "async_op": True}
    work = getattr(interlace, op.name)(*tensors, **root, **options)

    def end() -> Sequence[Tensor]:
        work.wait()
        return [output]

    return end


def _begin_counted(op: Op, group: Communicator, record: Any, algorithm: str) -> Finish:
    """Start a grouped matmul with a bound of rows, whose counts stay on the device."""
    work: Any = interlace.all_to_all_grouped_matmul(
        record.input,
        record.weight,
        torch.tensor(record.input_splits),
        bias=record.bias,
        num_max_rows_per_rank=19 * len(record.input_splits),
        group=group,
        algorithm=record.algorithm,
        async_op=True,
    )
    return lambda: [work.wait()[0][: sum(record.output_splits)]]


def _in_form(form: Callable[..., Any], *more: None) -> Begin:
    """Return the start of an eager form, for an op that as an op would have ended at its start."""
    return lambda op, group, given, algorithm: form(group, (given, *more), async_op=True).wait


# -- exceptions from :class:`TargetCalls` -----------------------------------------------------------


def _whole(rows: int) -> RowCounts:
    return lambda size, call: [rows] + [0] * (size - 1)


def _two_sequences(setting: Setting) -> torch.Tensor:
    return setting.numbers(2, setting.own, KEY_HEADS, HEAD)


def _counts(setting: Setting) -> list[list[int]]:
    """Return rows by rank and expert, of two experts on every rank: a rank has none for one of them."""
    experts, ranks = range(2 * setting.size), range(setting.size)
    return [[(7 * e + 9 * rank + setting.call) % 20 for e in experts] for rank in ranks]


def _received_counts(setting: Setting) -> list[int]:
    experts = 2 * setting.rank, 2 * setting.rank + 1
    return [each[expert] for expert in experts for each in _counts(setting)]


def _quantized_name(setting: Setting) -> str:
    return "fp8_static" if setting.call == 2 and kernel_makes_fp8(default_group()) else ""


def _format(setting: Setting) -> str:
    """Return the format of a call: scales of each dtype, numbers of 8 and of 4 bits, and a ``whole``."""
    return ("mxfp8", "nvfp4", "fp8_block128")[setting.call % 3]


def _packed_numbers(setting: Setting, rows: int, whole: float = 2.0) -> torch.Tensor:
    """Return packed rows of whole numbers; neighbour blocks differ in scale, along k, rows and ranks."""
    kind = FORMATS[_format(setting)]
    block = torch.arange(WIDE) // kind.block
    factor = whole * 2.0 ** ((torch.arange(rows)[:, None] + block + setting.rank) % 3)
    return kind.packed_rows(setting.numbers(rows, WIDE) * factor, whole)


def _packed_weight(setting: Setting) -> torch.Tensor:
    return _packed_numbers(setting, INNER, whole=4.0).mT


def _of_methods(quick: int) -> dict[str, Any]:
    """Return options of attention: the first ``quick`` algorithms are for a quick check."""
    names = tuple(BY_NAME["context_parallel_attention"].algorithms)
    return {"algorithms": (*names[:-1], "auto unfused", "ulysses unfused"), "quick": names[:quick]}


_PLAIN = TargetCalls(
    lambda size, call: [1] * size,
    lambda size: 20,
    begin=_begin_eager,
    otherwise={"low_latency": {"width": lambda size: MANY}, "auto": {"width": lambda size: 40}},
)
_TOKENS = TargetCalls(
    lambda size, call: [(5 * rank + 3 * call) % 8 for rank in range(size)],
    tiles=lambda size, call: {"programs": 2 * size},  # two of them send to each rank
)
_EXCHANGED = TargetCalls(
    lambda size, call: range(17, 17 + size),
    lambda size: INNER * size,
    tiles=lambda size, call: {"chunks": 2},
)
_REDUCED_SCALES = TargetCalls(
    examples={
        "format": _format,
        "input": lambda setting: _packed_numbers(setting, setting.total),
        "weight": _packed_weight,
    }
)
_SWITCH = {"multimem": True, "output_descriptors": True}
_NORMED = TargetCalls(
    lambda size, call: [count for _, count in split_rows(3 * size + 1, size)],
    lambda size: 3 * INNER,  # two tiles, or blocks, the second of which is not full
    {"quantize": _quantized_name},
    # from the third call on a part is one tile: there are programs that norm its rows and send nothing
    lambda size, call: {"block_n": 16 if call < 2 else 32},
    otherwise={"low_latency": {"rows": _whole(1), "width": lambda size: MANY}},
)
CALLS_OF: dict[str, TargetCalls] = {
    # by switch: the kernel with copiers that send to all ranks at once
    "all_gather_matmul": TargetCalls(
        algorithms=(*BY_NAME["all_gather_matmul"].algorithms, "switch"),
        otherwise={"switch": {"asks_for": "fused", "tiles": lambda size, call: _SWITCH}},
    ),
    "matmul_all_reduce": TargetCalls(_whole(18)),
    "block_scaled_all_gather_matmul": TargetCalls(
        examples={
            "format": _format,
            "input": lambda setting: _packed_numbers(setting, setting.own),
            "weights": lambda setting: [_packed_weight(setting), _packed_weight(setting).flip(1)],
        }
    ),
    "block_scaled_matmul_reduce_scatter": _REDUCED_SCALES,
    "block_scaled_matmul_all_reduce": replace(_REDUCED_SCALES, rows=_whole(18)),
    "matmul_reduce_scatter_norm": _NORMED,
    "reduce_scatter_norm": _NORMED,
    "matmul_all_reduce_norm": replace(_NORMED, rows=_whole(5)),
    "all_reduce_norm": replace(_NORMED, rows=_whole(5)),
    "all_gather_grouped_matmul": TargetCalls(
        lambda size, call: [(9 * rank + 7 * call + 7) % 20 for rank in range(size)]
    ),
    "all_to_all_grouped_matmul": TargetCalls(
        examples={
            "input": lambda setting: setting.numbers(sum(_counts(setting)[setting.rank]), INNER),
            "input_splits": lambda setting: _counts(setting)[setting.rank],
            "output_splits": _received_counts,
            "return_received": constant(False),
        },
        second={"begin": _begin_counted},
        kernels=("counted_grouped_matmul_kernel",),
    ),
    "dispatch": replace(
        _TOKENS,
        second={"begin": _in_form(dispatch_rows, None), "examples": {"max_tokens": constant(0)}},
    ),
    "combine": _TOKENS,
    "grouped_matmul_combine": replace(
        _TOKENS, tiles=lambda size, call: {}, second={"stand_in": "routed_matmul_combine"}
    ),
    "context_parallel_attention": TargetCalls(**_of_methods(2)),
    "context_parallel_attention_backward": TargetCalls(
        # other arguments than the forward's, which take long to make
        examples={
            "output": example_queries,
            "lse": lambda setting: torch.zeros(1, HEADS, setting.own),
        },
        **_of_methods(1),
    ),
    # now and then rank 0 has no token
    "distributed_decode": TargetCalls(
        lambda size, call: [20 * (call % 2)] + [20] * (size - 1),
        begin=_in_form(decode),
        examples={
            "q": lambda setting: setting.numbers(2, HEADS, HEAD, same=True),
            "key": _two_sequences,
            "value": _two_sequences,
            "lengths": lambda setting: torch.tensor([setting.own, setting.own // 3]),
        },
    ),
    "matmul_all_to_all": _EXCHANGED,
    "all_to_all_matmul": replace(_EXCHANGED, width=lambda size: 3 * INNER),
    "all_gather": _PLAIN,
    "reduce_scatter": _PLAIN,
    "all_to_all": replace(_PLAIN, begin=_begin),
    "all_reduce": replace(_PLAIN, rows=_whole(1)),
    # one root, which is ahead of the other ranks
    "broadcast": replace(_PLAIN, rows=_whole(1), width=lambda size: MANY),
}
NAMES = {
    "context_parallel_attention": "attention",
    "context_parallel_attention_backward": "attention_backward",
    "distributed_decode": "decode",
}
"""Targets with exceptions."""
STANDS_FOR = {
    "all_gather_scaled_matmul": "all_gather_matmul",
    "scaled_matmul_reduce_scatter": "matmul_reduce_scatter",
    "routed_matmul_combine": "grouped_matmul_combine",
}
"""The target with an op's kernels, where the op has no other."""
_LATE = ("late puts",)  # finds more than puts that store at once
_OVER_NODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "all_gather": ("auto", ("move_kernel", "quiet_kernel")),
    "reduce_scatter": ("auto", ("node_reduce_scatter_kernel", "put_credits_kernel")),
    "all_to_all": ("auto", ()),  # the moves are the same as in nodes.all_gather
    "dispatch": ("auto", ()),
    "combine": ("auto", ()),
    "grouped_matmul_combine": ("auto", ()),
    "all_gather_matmul": ("fused", ()),
    "matmul_reduce_scatter": ("fused", ("matmul_node_reduce_scatter_kernel", "node_sums_kernel")),
}


def _signals() -> None:
    """Run the four kernels that streams on a GPU use, around torch copies into peers' memory."""
    place = default_group().place
    rank, world_size = place.rank, place.world_size
    words = signal.HEADER_WORDS + world_size
    buffer = place.allocate(words * 8 + world_size * 64)
    buffer.view(rank, 8 * signal.SPIN_LIMIT_WORD, (1,), torch.int64).fill_(place.poll_limit())
    peers = peers_of(buffer, world_size)
    place.allocate(8)  # the words are set on every rank before any kernel of a peer runs
    for call in range(CALLS):
        setting = Setting(rank, world_size, call=call)
        slots.wait_credits_kernel[(1,)](peers)
        for peer in range(world_size):
            theirs = buffer.view(peer, words * 8 + rank * 64, (16,), torch.float32)
            theirs.copy_(setting.numbers(16))
            slot_byte = 8 * (signal.HEADER_WORDS + rank)
            signal.publish_kernel[(1,)](peers, peer, slot_byte)
        for source in range(world_size):
            slot_byte = 8 * (signal.HEADER_WORDS + source)
            signal.wait_kernel[(1,)](peers, source, slot_byte)
            received = buffer.view(rank, words * 8 + source * 64, (16,), torch.float32)
            if not torch.equal(received, setting.of(source).numbers(16)):
                raise AssertionError(f"wrong data on rank {rank} in call {call}")
        slots.finish_kernel[(1,)](peers)


def _target(op: Op) -> VerifyTarget:
    calls = CALLS_OF.get(op.name, TargetCalls())
    kernels = dict.fromkeys(kernel for each in op.algorithms.values() for kernel in each)
    return VerifyTarget(_algorithms(op, calls), (*kernels, *calls.kernels), calls.quick)


def _node_target(op: str) -> VerifyTarget:
    algorithm, kernels = _OVER_NODES[op]
    variants = _over_nodes(BY_NAME[op], CALLS_OF.get(op, TargetCalls()), algorithm)
    return VerifyTarget(variants, kernels, _LATE if kernels else ())


def targets(ops: Mapping[str, Op]) -> dict[str, VerifyTarget]:
    kernels = "publish_kernel", "wait_kernel", "wait_credits_kernel", "finish_kernel"
    of_kernels = {name: op for name, op in ops.items() if op.algorithms and name not in STANDS_FOR}
    return {
        "signal": VerifyTarget({"kernels": _signals}, kernels),
        **{NAMES.get(name, name): _target(op) for name, op in of_kernels.items()},
        **{f"nodes.{op}": _node_target(op) for op in _OVER_NODES},
    }


TARGETS = targets({op.name: op for op in OPS})
