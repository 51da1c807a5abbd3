"""The ops under torch's LocalTensorMode: one process plays all ranks, and gets what ranks would get."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._library.simple_registry import singleton
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import interlace
from interlace import functional as F
from interlace.ops import local_tensor
from interlace.ops.attention.functional import attention_of_heads, context_parallel_attention
from interlace.ops.collectives.records import OPS as COLLECTIVES
from support import SCALES_BY_ROW

RANKS = 4
PAIRS = [[0, 2], [1, 3]]
Case = Callable[[Any], Any]


def values(*shape: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + len(shape))
    return (torch.randn(*shape, generator=generator) * 4).to(dtype)


def premultiplied(x: torch.Tensor) -> torch.Tensor:
    return F.all_reduce(x, dist._make_nccl_premul_sum(0.5))


def chain(x: torch.Tensor) -> torch.Tensor:
    """Results of ops, not waited for, go into ops; of two kinds of groups."""
    return F.all_gather(F.all_reduce(x, "avg", group=PAIRS) * 2, 1, group=[[0, 1], [2, 3]])


def into(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    F.all_reduce(x.detach(), "max", out=out)
    return out


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().clone()
    torch.ops.interlace.broadcast_(y, 2, RANKS, "0")
    return torch.ops._c10d_functional.wait_tensor(y)


PLAIN: dict[str, Case] = {
    **{
        f"all_reduce {op}": lambda x, op=op: F.all_reduce(x, op)
        for op in ("sum", "avg", "product", "min", "max")
    },
    "all_reduce premul_sum": premultiplied,
    "all_reduce of halves": lambda x: F.all_reduce(x.bfloat16(), "avg"),
    "all_reduce of bits": lambda x: F.all_reduce(x.detach().int(), "bxor"),
    "all_reduce of pairs": lambda x: F.all_reduce(x, group=PAIRS, tag="fast"),
    "all_reduce out": into,
    "all_gather 0": lambda x: F.all_gather(x),
    "all_gather 1 of pairs": lambda x: F.all_gather(x, 1, group=PAIRS),
    "all_gather of numbers": lambda x: F.all_gather(x[0, 0]),
    "reduce_scatter 0": lambda x: F.reduce_scatter(x),
    "reduce_scatter 1": lambda x: F.reduce_scatter(x.t(), "avg", 1),
    "all_to_all": lambda x: F.all_to_all(x),
    "broadcast": lambda x: F.broadcast(x, 3),
    "broadcast_": in_place,
    "reduce": lambda x: F.reduce(x, "sum", 1),
    "permute": lambda x: F.permute(x, [2, 0, 3, 1]),
    "gather": lambda x: F.gather(x, 2, 1),
    "scatter": lambda x: F.scatter(x, 1),
    "rank": lambda x: torch.ops.interlace.rank(x, 2, "ranks:0,2|1,3"),
    "chain": chain,
}
WEIGHT = values(6, 8, rank=50)
BIAS = values(8, rank=51)
SAME = values(8, 6, rank=52)  # on all ranks
FUSED: dict[str, Case] = {
    "all_gather_matmul": lambda x: F.all_gather_matmul(x, WEIGHT, bias=BIAS),
    "all_gather_matmul of pairs": lambda x: F.all_gather_matmul(
        x.view(2, 4, 6), [WEIGHT, WEIGHT * 2], 1, group=PAIRS, return_gathered=True
    ),
    "all_gather_matmul k": lambda x: F.all_gather_matmul(x[:, :3], WEIGHT, 1, group=PAIRS),
    "matmul_reduce_scatter": lambda x: F.matmul_reduce_scatter(x, WEIGHT, bias=BIAS),
    "matmul_reduce_scatter n": lambda x: F.matmul_reduce_scatter(x, WEIGHT, "avg", 1, bias=BIAS),
    "matmul_all_reduce": lambda x: F.matmul_all_reduce(x, WEIGHT, bias=BIAS, group=PAIRS),
    "matmul_reduce_scatter normed": lambda x: F.matmul_reduce_scatter(
        x, WEIGHT, "avg", bias=BIAS, norm=interlace.LayerNorm(BIAS, BIAS), gather_normed=True
    ),
    "all_reduce_norm of pairs": lambda x: F.all_reduce_norm(
        x, residual=SAME, norm=interlace.RMSNorm(WEIGHT[:, 0]), group=PAIRS
    ),
    "all_gather_grouped_matmul": lambda x: F.all_gather_grouped_matmul(
        x, torch.stack([WEIGHT, -WEIGHT]), [3, 5], [3] * 4 + [5] * 4, return_received=True
    ),
    "all_to_all_grouped_matmul": lambda x: F.all_to_all_grouped_matmul(
        x, WEIGHT[None], [2] * 4, [2] * 4, bias=BIAS[None]
    ),
    "matmul_all_to_all": lambda x: F.matmul_all_to_all(x.view(4, 2, 6), WEIGHT, bias=BIAS),
    "all_to_all_matmul of pairs": lambda x: F.all_to_all_matmul(
        x, torch.cat([WEIGHT, WEIGHT * 2]), bias=BIAS, group=PAIRS
    ),
}


def through_experts(x: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
    """Two of four experts for each token, one of which every rank has."""
    chosen, weights = x.detach()[:, :4].argsort(1)[:, :2], x.detach()[:, 4:].abs()
    received, handle = F.dispatch(x, chosen, weights, 4, **how)
    product = F.grouped_matmul_combine(received.x, WEIGHT[None], handle, bias=BIAS[None])
    return product, F.combine(received.x * 2, handle)


BOUND = {"num_max_dispatch_tokens_per_rank": 8}
FUSED |= {
    "dispatch": through_experts,
    "dispatch with a bound": lambda x: through_experts(x, **BOUND, capacity=3),
    "dispatch, low latency": lambda x: through_experts(x, **BOUND, low_latency=True),
}


def attended(x: torch.Tensor, **how: Any) -> Any:
    """Of two heads that see one head of keys; of four where heads are exchanged."""
    heads = x.view(1, 8, -1, 3) if "method" not in how else x.repeat(1, 2).view(1, 8, 4, 3)
    keys = heads if "method" in how else heads[:, :, :1]
    return context_parallel_attention(heads, keys, keys * 2, **how)


def decoded(x: torch.Tensor, **how: Any) -> Any:
    """The keys of two sequences, of which the ranks have some each; no rank has all."""
    x = x.detach().view(2, 4, 2, 3)
    return F.distributed_decode(SAME.view(2, 4, 2, 3)[:, :3], (x, x * 2), **how)


LENGTHS, PAGES = torch.tensor([3, 1]), torch.tensor([[1], [0]])
FUSED |= {
    "attention": lambda x: attended(x, causal=True, return_lse=True),
    "attention of packed sequences": lambda x: attended(
        x, cu_seqlens=torch.tensor([0, 5, 20]), window=(3, 2), balance="contiguous"
    ),
    "attention of exchanged heads": lambda x: attended(x, method="ulysses", causal=True),
    "attention of pairs": lambda x: attended(x, causal=True, group=PAIRS),
    "attention of heads": lambda x: attention_of_heads(
        x.view(1, 8, 2, 3), x.view(1, 8, 2, 3), x.view(1, 8, 2, 3), causal=True
    ),
    "decode": lambda x: decoded(x),
    "decode of pages": lambda x: decoded(x, lengths=LENGTHS, block_table=PAGES),
}
FP8 = torch.float8_e4m3fn
HALF, BY_COLUMN = torch.tensor(0.5), torch.arange(1.0, 9.0).view(1, 8)
SCALED: dict[str, Case] = {
    "all_gather_scaled_matmul": lambda x: F.all_gather_scaled_matmul(
        x.detach().to(FP8), [WEIGHT.to(FP8)] * 2, by_row(x), [BY_COLUMN, HALF], return_gathered=True
    ),
    "scaled_matmul_reduce_scatter": lambda x: F.scaled_matmul_reduce_scatter(
        x.detach().to(FP8), WEIGHT.to(FP8), by_row(x), HALF, "avg", 1, bias=BIAS
    ),
}


def by_row(x: torch.Tensor) -> torch.Tensor:
    return x.detach()[:, :1].abs()


if SCALES_BY_ROW:
    FUSED |= SCALED


def waited(made: Any) -> list[torch.Tensor]:
    if isinstance(made, (list, tuple)):
        return [tensor for each in made for tensor in waited(each)]
    return [F.wait(made)]


def with_gradients(case: Case, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs, and the gradient of ``x`` where there is one."""
    made = waited(case(x))
    if made[0].requires_grad:
        first = made[0]
        ramp = torch.arange(float(first.numel())).view(first.shape)
        (grad,) = torch.autograd.grad((first * ramp).sum(), x)
        made.append(grad)
    # torch cannot pickle fp8 (2.13)
    return [(each.float() if each.dtype is FP8 else each).detach() for each in made]


def as_ranks() -> dict[str, list[torch.Tensor]]:
    """What the calling rank of a real group gets."""
    x = values(8, 6, rank=interlace.get_rank()).requires_grad_()
    return {name: with_gradients(case, x) for name, case in {**PLAIN, **FUSED}.items()}


def test_every_collective_has_a_case() -> None:
    assert {op.name for op in COLLECTIVES} <= {case.partition(" ")[0] for case in PLAIN}


@pytest.fixture(scope="module")
def real() -> list[dict[str, list[torch.Tensor]]]:
    return interlace.run(as_ranks, RANKS, place="shm")


def local(make: Callable[[int], torch.Tensor], **options: Any) -> Any:
    return LocalTensor({rank: make(rank) for rank in range(RANKS)}, **options)


def compare(got: list[Any], expected: list[list[torch.Tensor]], *, exact: bool) -> None:
    for index, whole in enumerate(got):
        assert isinstance(whole, LocalTensor)
        for rank, of_rank in enumerate(expected):
            mine, theirs = whole._local_tensors[rank], of_rank[index]
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
            if index == 0:
                assert mine.stride() == theirs.stride()
            if exact:
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
                continue
            # sums that cancel are as exact as their terms are large; processors sum in orders of their own
            scale = float(theirs.detach().double().abs().max()) if theirs.numel() else 0.0
            torch.testing.assert_close(mine / (scale or 1), theirs / (scale or 1))


@pytest.mark.parametrize("name", [*PLAIN, *FUSED])
@pytest.mark.parametrize("inside", [True, False], ids=["in the mode", "by the tensor"])
def test_all_ranks_at_once_get_what_ranks_get(name: str, inside: bool, real: Any) -> None:
    """Outputs, their strides, and gradients; without any process group."""
    x = local(lambda rank: values(8, 6, rank=rank), requires_grad=True)
    case = PLAIN.get(name) or FUSED[name]
    mode = LocalTensorMode(RANKS) if inside else contextlib.nullcontext()
    if not inside and (
        "0" in name or "group" not in case.__code__.co_names + case.__code__.co_consts
    ):
        named = interlace.GroupSpec("all of them", RANKS)
        case = with_default(case, named)
    with mode:
        got = with_gradients(case, x)
    expected = [of_rank[name] for of_rank in real]
    assert len(got) == len(expected[0])
    compare(got, expected, exact=name in PLAIN)


def with_default(case: Case, group: Any) -> Case:
    """``case`` where None means ``group``: without mode and group nothing else could say what is all."""

    def changed(x: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("interlace.groups.specs._of_default", lambda: (group.name, group.size))
            return case(x)

    return changed


def test_every_op_has_a_rule() -> None:
    """An op of a group without one would run once per rank, each alone."""
    schemas = [each for each in torch._C._jit_get_all_schemas() if "str group" in str(each)]
    names = [each.name for each in schemas if each.name.startswith("interlace::")]
    assert len(names) > 15
    without = [
        name
        for name in names
        if singleton.find(name).torch_dispatch_rules.find(LocalTensorMode) is None
    ]
    assert without == []


def test_uneven_all_to_all() -> None:
    """Sizes that differ from rank to rank, and outputs that do."""
    sent = [[1, 2], [3, 0]]
    received = [[1, 3], [2, 0]]
    rows = [torch.arange(3.0) + 10 * rank for rank in range(2)]
    mode = LocalTensorMode(2)
    x = LocalTensor(dict(enumerate(rows)))
    with mode:
        sizes = [
            [torch.SymInt(torch.distributed._local_tensor.LocalIntNode(dict(enumerate(column))))
             if column[0] != column[1] else column[0]
             for column in zip(*table, strict=True)]
            for table in (received, sent)
        ]  # fmt: skip
        y = F.all_to_all(x, *sizes) * 1
    assert y._local_tensors[0].tolist() == [0.0, 10.0, 11.0, 12.0]
    assert y._local_tensors[1].tolist() == [1.0, 2.0]


def test_what_is_no_answer_is_an_error() -> None:
    x = local(lambda rank: torch.ones(4, 4) * rank)
    uneven = local(lambda rank: torch.ones(4 + rank % 2))
    wide = local(lambda rank: torch.ones(4), requires_grad=False)
    plain = torch.ones(4)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "rank 1 is not a member", lambda: F.all_reduce(x, group=[0, 2])),
        (ValueError, "only .0, 1, 2, 3. are simulated", lambda: F.all_reduce(x, group=range_of(8))),
        (ValueError, "give the ranks", lambda: F.all_reduce(x, group=interlace.GroupSpec("tp", 2))),
        (ValueError, "shape of input differs", lambda: F.all_reduce(uneven)),
        (TypeError, "plain tensors only", lambda: F.all_reduce(plain)),
        (ValueError, "root|0..3", lambda: F.broadcast(x, 4)),
        (TypeError, "not defined for", lambda: F.all_reduce(wide, "band")),
        (ValueError, "does not divide", lambda: F.reduce_scatter(local(lambda r: torch.ones(6)))),
        (TypeError, "out must be a LocalTensor", lambda: F.all_reduce(wide, out=plain)),
        (ValueError, "op was made for", lambda: torch.ops.interlace.all_reduce(x, "sum", 2, "0")),
        (
            ValueError,
            "of different ranks",
            lambda: F.matmul_all_reduce(x, LocalTensor({0: torch.ones(4, 4)})),
        ),
    ]
    for kind, message, call in refused:
        with LocalTensorMode(RANKS) as mode, pytest.raises(kind, match=message):
            with mode.disable():
                mode.enable_()
            call()


class Derived(LocalTensorMode):
    """Torch does not find a rule for it."""


def one_rank_alone() -> str:
    x = LocalTensor({0: torch.ones(2), 1: torch.ones(2)})
    try:
        with Derived(2):
            return f"no error, {torch.ops.interlace.all_reduce(x, 'sum', 1, '0')}"
    except TypeError as error:
        return str(error)


def test_where_rules_are_not_found() -> None:
    """An op that torch would run once per rank, on a group that is real, refuses."""
    assert "once per simulated rank" in interlace.run(one_rank_alone, 1)[0]


def range_of(size: int) -> list[int]:
    return list(range(size))


def test_names_can_be_defined() -> None:
    x = local(lambda rank: torch.tensor([float(1 << rank)]))
    local_tensor.define("rows", PAIRS)
    with LocalTensorMode(RANKS):
        y = F.all_reduce(x, group=interlace.GroupSpec("rows")) + 0
    assert [y._local_tensors[rank].item() for rank in range(RANKS)] == [5.0, 10.0, 5.0, 10.0]


def eager_calls() -> list[str]:
    """What the eager functions say of a LocalTensor, and of plain tensors in the mode."""
    x = LocalTensor({rank: torch.ones(2, 2) * (rank + 1) for rank in range(2)})
    plain, out = torch.ones(2, 2), torch.empty(4, 2)
    calls: list[Callable[[Any], Any]] = [
        interlace.all_reduce,
        lambda t: interlace.broadcast(t, 0),
        lambda t: interlace.all_gather_into_tensor(out, t),
        lambda t: interlace.reduce_scatter_tensor(torch.empty(1, 2), t),
        lambda t: interlace.all_gather_matmul(t, plain),
        lambda t: interlace.matmul_reduce_scatter(plain, t),
        lambda t: interlace.matmul_all_reduce(t, plain),
    ]
    said = []
    for call in calls:
        try:
            said.append(f"no error, {call(x)}")
        except TypeError as error:
            said.append(str(error))
    with LocalTensorMode(2):
        for call in calls:
            try:
                said.append(f"no error, {call(plain)}")
            except TypeError as error:
                said.append(str(error))
    return said


def test_eager_functions_refuse() -> None:
    """They work on memory, which a LocalTensor does not have: never a wrong number."""
    for said in interlace.run(eager_calls, 2, place="shm"):
        assert len(said) == 14
        assert all("interlace.functional" in each for each in said), said


# -- torch's side: DTensor, groups, meshes -------------------------------------------------------------


@pytest.fixture
def fake_world() -> Iterator[None]:
    """The usual company of LocalTensor: a default group whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_world")
def test_groups_of_torch() -> None:
    """By None, name, ProcessGroup and mesh; the mesh need not be in the order of ranks."""
    x = local(lambda rank: torch.tensor([float(1 << rank)]))
    evens, odds = [5.0, 10.0, 5.0, 10.0], [3.0, 3.0, 12.0, 12.0]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    turned = dist.DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("a", "b"))
    with LocalTensorMode(RANKS):
        sums = {
            "default": F.all_reduce(x),
            "world": F.all_reduce(x, group=dist.group.WORLD),
            "dp": F.all_reduce(x, group=mesh["dp"]),
            "name": F.all_reduce(x, group=mesh.get_group("dp").group_name),
            "tp": F.all_reduce(x, group=mesh.get_group("tp")),
            "turned": F.all_gather(x, group=(turned, "b")),
        }
    got = {
        name: [t.tolist() for t in F.wait(y)._local_tensors.values()] for name, y in sums.items()
    }
    assert got["default"] == got["world"] == [[15.0]] * 4
    assert got["dp"] == got["name"] == [[value] for value in evens]
    assert got["tp"] == [[value] for value in odds]
    assert got["turned"] == [[1.0, 8.0], [4.0, 2.0], [4.0, 2.0], [1.0, 8.0]]
    with pytest.raises(interlace.InterlaceError, match="fake"):
        interlace.all_reduce(x)


@pytest.mark.usefixtures("fake_world")
def test_dtensor() -> None:
    """Shards of DTensors through interlace's ops, and what comes out as DTensors again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w1, w2 = values(8, 6, rank=1), values(6, 8, rank=2), values(8, 6, rank=3)
    with LocalTensorMode(RANKS):
        rows = distribute_tensor(x, mesh, [Replicate(), Shard(0)])
        columns = distribute_tensor(w1, mesh, [Replicate(), Shard(1)])
        inner = distribute_tensor(w2, mesh, [Replicate(), Shard(0)])
        h = F.all_gather_matmul(rows.to_local(), columns.to_local(), group=(mesh, "tp"))
        y = F.matmul_reduce_scatter(torch.relu(h), inner.to_local(), group=mesh["tp"])
        out = DTensor.from_local(F.wait(y), mesh, [Replicate(), Shard(0)])
        whole = out.redistribute(mesh, [Replicate(), Replicate()]).to_local()
        again = out.redistribute(mesh, [Shard(0), Replicate()]).to_local()
        reduced = F.reduce_scatter(again, group=mesh["dp"]) * 1
    expected = torch.relu(x @ w1) @ w2
    torch.testing.assert_close(whole.reconcile(), expected)
    halves = expected.chunk(2)
    for rank, part in reduced._local_tensors.items():
        torch.testing.assert_close(part, (halves[0] + halves[1]).chunk(2)[rank // 2])


@pytest.mark.usefixtures("fake_world")
def test_parallel_mlp() -> None:
    """Tensor parallelism of torch around a layer of ours, with gradients."""

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # every rank has all of x, so the average over ranks changes nothing
            mean: torch.Tensor = F.all_reduce(x, "avg", group=(mesh, "tp")) * 2
            return mean

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    x = values(5, 6, rank=9)
    reference = layers(x) * 2
    reference.sum().backward()
    wanted = layers[0].weight.grad
    assert wanted is not None
    layers.zero_grad()
    with LocalTensorMode(RANKS):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = torch.nn.Sequential(parallelize_module(layers, mesh, plan), Scaled())
        y = model(local(lambda rank: x))
        y.sum().backward()
        grad = layers[0].weight.grad.full_tensor()
    torch.testing.assert_close(y.reconcile(), reference)
    torch.testing.assert_close(grad.reconcile(), wanted)
