"""Ranks of the tests on a GPU, virtual ranks and processes alike. Importable by new processes."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.places.gpu import driver
from interlace.runtime.places.gpu.memory import MemoryRefused, TorchMemory

ROWS, INNER, COLUMNS = 256, 128, 192
SMALL_PARTS = 4  # per input, each small enough for a low-latency kernel
NANOSECONDS = 1_000_000
Op = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by(op: str, algorithm: str, **options: Any) -> Op:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return getattr(interlace, op)(x, w, algorithm=algorithm, **options)  # type: ignore[no-any-return]

    call.__name__ = f"{op}_{algorithm}"
    return call


fused_gather, pipelined_gather, unfused_gather = (
    by("all_gather_matmul", algorithm) for algorithm in ("fused", "pipelined", "unfused")
)
fused_scatter, pipelined_scatter = (
    by("matmul_reduce_scatter", algorithm) for algorithm in ("fused", "pipelined")
)
reduced_product = by("matmul_all_reduce", "fused")


def gather_with_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    gathered, out = interlace.all_gather_matmul(x, w, algorithm="fused", return_gathered=True)
    return torch.cat([out, gathered @ w])


def asynchronous_gather(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return interlace.all_gather_matmul(x, w, algorithm="fused", async_op=True).wait()


def in_place(op: str, *rest: Any, parts: int = 1, **options: Any) -> Op:
    """Return a collective on a copy of its input, which may be cut into parts."""

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        for part in out.chunk(parts):
            work = getattr(interlace, op)(part, *rest, **options)
            if work is not None:
                work.wait()
        return out

    return call


def all_gather_low_latency(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    parts = []
    for part in x.chunk(SMALL_PARTS):
        out = x.new_empty(interlace.get_world_size(), *part.shape)
        interlace.all_gather(out, part, algorithm="low_latency")
        parts.append(out)
    return torch.cat(parts, 1).view(-1, x.shape[1])


def all_gather(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(interlace.get_world_size() * x.shape[0], x.shape[1])
    interlace.all_gather(out, x, algorithm="kernel")
    return out


def reduce_scatter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0] // interlace.get_world_size(), x.shape[1])
    interlace.reduce_scatter(out, x)
    return out


def all_to_all(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    interlace.all_to_all_single(out, x)
    return out


def splits_of(rank: int, experts: int) -> list[int]:
    """Uneven; some expert gets nothing from some rank."""
    sizes = [17 * ((rank + e) % 3) for e in range(experts)]
    sizes[rank] += ROWS - sum(sizes)
    return sizes


def grouped_exchange(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of one expert per rank; the expert of rank r also multiplies by r + 1."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    weight = (w * (rank + 1)).unsqueeze(0)
    splits = splits_of(rank, world_size)
    return interlace.all_to_all_grouped_matmul(x, weight, splits, algorithm="fused")[0]


def grouped_gather(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As many experts as ranks, on all ranks."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    weight = torch.stack([w * (e + 1) for e in range(world_size)])
    splits = splits_of(rank, world_size)
    return interlace.all_gather_grouped_matmul(x, weight, splits, algorithm="fused")[0]


def two_experts(world_size: int, device: torch.device) -> torch.Tensor:
    """Return two experts for each token: on the rank with the token's number, and on the next."""
    tokens = torch.arange(ROWS, device=device)
    return torch.stack([tokens, tokens + 1], 1) % world_size


def expert_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Send rows to experts and back without host counts; the expert of rank r multiplies by r + 1."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    idx = two_experts(world_size, x.device)
    received, handle = interlace.experts.dispatch(
        x, idx, None, world_size, num_max_dispatch_tokens_per_rank=ROWS, algorithm="fused"
    )
    return interlace.experts.combine(received.x * (rank + 1), handle, algorithm="fused")


def expert_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Run both matmuls of a layer: by ``w`` times the rank's number (from 1), then by the unit matrix."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    idx = two_experts(world_size, x.device)
    rows, sent = interlace.experts.permute(x, idx, world_size)
    up, down = (w * (rank + 1)).unsqueeze(0), torch.eye(COLUMNS, device=x.device).unsqueeze(0)
    hidden, splits = interlace.all_to_all_grouped_matmul(rows, up, sent, algorithm="fused")
    return interlace.grouped_matmul_combine(hidden, down, splits, idx, algorithm="fused")


def expert_layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Dispatch, and combine with the product by ``w`` times the rank's number, without host counts."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    received, handle = interlace.experts.dispatch(
        x,
        two_experts(world_size, x.device),
        None,
        world_size,
        num_max_dispatch_tokens_per_rank=ROWS,
        algorithm="fused",
    )
    weight = (w * (rank + 1)).unsqueeze(0)
    return interlace.grouped_matmul_combine(received.x, weight, handle, algorithm="fused")


IN_PARTS: Any = {"parts": SMALL_PARTS, "algorithm": "low_latency"}
OPS: dict[str, Op] = {
    "fused_gather": fused_gather,
    "pipelined_gather": pipelined_gather,
    "unfused_gather": unfused_gather,
    "asynchronous_gather": asynchronous_gather,
    "fused_scatter": fused_scatter,
    "pipelined_scatter": pipelined_scatter,
    "reduced_product": reduced_product,
    "gather_with_input": gather_with_input,
    "all_reduce": in_place("all_reduce", algorithm="kernel"),
    "all_reduce_by_copies": in_place("all_reduce", algorithm="copy", async_op=True),
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "broadcast": in_place("broadcast", 1, algorithm="copy"),
    "grouped_exchange": grouped_exchange,
    "grouped_gather": grouped_gather,
    "all_reduce_low_latency": in_place("all_reduce", **IN_PARTS),
    "all_gather_low_latency": all_gather_low_latency,
    "broadcast_low_latency": in_place("broadcast", 1, **IN_PARTS),
    "expert_rows": expert_rows,
    "expert_products": expert_products,
    "expert_layer": expert_layer,
}
REPLAYED = [
    "fused_gather", "asynchronous_gather", "fused_scatter", "reduced_product", "all_reduce",
    "all_reduce_by_copies", "all_to_all", "grouped_exchange", "all_reduce_low_latency",
    "all_gather_low_latency", "broadcast_low_latency", "expert_rows", "expert_layer",
]  # fmt: skip


def input_of(rank: int, call: int) -> torch.Tensor:
    """Small whole numbers: exact in every order of summation."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randint(-3, 4, (ROWS, INNER), generator=generator).float()


def weight() -> torch.Tensor:
    return torch.randint(
        -2, 3, (INNER, COLUMNS), generator=torch.Generator().manual_seed(7)
    ).float()


def expected(name: str, rank: int, world_size: int, call: int) -> torch.Tensor:
    """Return the result of op ``name`` by torch on the CPU."""
    inputs, w = [input_of(r, call) for r in range(world_size)], weight()
    gathered, summed = torch.cat(inputs), sum(inputs[1:], inputs[0])
    part = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    if name.startswith("grouped_"):
        sizes = [splits_of(r, world_size) for r in range(world_size)]
        parts = [torch.split(each, own) for each, own in zip(inputs, sizes, strict=True)]
        experts = [rank] if name == "grouped_exchange" else range(world_size)
        return torch.cat([each[e] @ w * (e + 1) for e in experts for each in parts])
    if name.startswith("expert_"):
        factors = (two_experts(world_size, torch.device("cpu")) + 1).sum(1, keepdim=True)
        return (inputs[rank] if name == "expert_rows" else inputs[rank] @ w) * factors
    if name == "gather_with_input":
        return torch.cat([gathered @ w, gathered @ w])
    if name.endswith("_gather") and name != "all_gather":
        return gathered @ w
    if name.endswith("_scatter") and name != "reduce_scatter":
        return (summed @ w)[part]
    name = name.removesuffix("_low_latency")
    return {
        "reduced_product": lambda: summed @ w,
        "all_reduce": lambda: summed,
        "all_reduce_by_copies": lambda: summed,
        "all_gather": lambda: gathered,
        "reduce_scatter": lambda: summed[part],
        "all_to_all": lambda: torch.cat([each[part] for each in inputs]),
        "broadcast": lambda: inputs[1],
    }[name]()


def check(name: str, call: int, output: torch.Tensor) -> bool:
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    return torch.equal(output.cpu(), expected(name, rank, world_size, call))


def operations(names: list[str], rounds: int, torch_memory: bool, words: bool) -> list[str]:
    """Run every op ``rounds`` times with other inputs, and return the errors."""
    if not torch_memory:
        TorchMemory.allocate = _refused  # type: ignore[method-assign]
    if not words:
        driver.stream_words = lambda device: None  # type: ignore[assignment]
    rank, device = interlace.get_rank(), interlace.device()
    w, wrong = weight().to(device), []
    for call in range(rounds):
        x = input_of(rank, call).to(device)
        for name in names:
            if not check(name, call, OPS[name](x, w)):
                wrong.append(f"{name}, call {call}, rank {rank}")
    return wrong


def _refused(self: TorchMemory, nbytes: int, *, overlapping: bool) -> Any:
    raise MemoryRefused("refused by the test")


def memory_kind() -> str:
    place: Any = default_group().place
    interlace.all_reduce(torch.ones(8, device=interlace.device()))
    return str(place._memory.kind)


def replays(name: str, count: int) -> list[int]:
    """Replay a captured op with other inputs and eager calls between; return the wrong replays."""
    rank, device = interlace.get_rank(), interlace.device()
    x, w = input_of(rank, 0).to(device), weight().to(device)
    place = default_group().place

    def meet() -> None:
        place.exchange(b"", "a replay")  # before anybody blocks: virtual ranks share a host

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            OPS[name](x, w)
    meet()
    torch.cuda.synchronize()
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        output = OPS[name](x, w)
        graph.capture_end()
        wrong = []
        for number in range(count):
            x.copy_(input_of(rank, number).to(device))
            graph.replay()
            kept = output.clone()
            meet()
            if not check(name, number, kept):
                wrong.append(number)
            if number % 10 == 5:
                x.copy_(input_of(rank, 7000 + number).to(device))
                if not check(name, 7000 + number, OPS[name](x, w)):
                    wrong.append(7000 + number)
    meet()
    return wrong


def host_goes_on() -> tuple[bool, bool]:
    """Return whether ``wait()`` returns before seconds of other device work end, and the op is right."""
    device = interlace.device()
    x, w = input_of(interlace.get_rank(), 1).to(device), weight().to(device)
    fused_gather(x, w)
    default_group().place.exchange(b"", "warm")
    torch.cuda.synchronize()
    torch.cuda._sleep(4000 * NANOSECONDS)
    work = interlace.all_gather_matmul(x, w, algorithm="fused", async_op=True)
    output = work.wait()
    early = not work.is_completed()
    return early, check("fused_gather", 1, output)


def dropped_inputs(rounds: int) -> list[int]:
    """Run asynchronous ops whose inputs the caller frees; new tensors take the memory at once."""
    rank, device, wrong = interlace.get_rank(), interlace.device(), []
    w = weight().to(device)
    for call in range(rounds):
        torch.cuda._sleep(NANOSECONDS)
        work = interlace.all_gather_matmul(
            input_of(rank, call).to(device), w, algorithm="fused", async_op=True
        )
        poison = [torch.full((ROWS, INNER), torch.nan, device=device) for _ in range(4)]
        if not check("fused_gather", call, work.wait()):
            wrong.append(call)
        del poison
    return wrong


def layers(rounds: int) -> list[str]:
    """Compare column- and row-parallel layers with unsharded ones; return the errors."""
    from interlace import nn

    rank, world_size, device = interlace.get_rank(), interlace.get_world_size(), interlace.device()
    wrong: list[str] = []
    for number in range(rounds):
        whole = [
            torch.cat([input_of(r, number) for r in range(world_size)]),
            weight().t(),
            weight(),
        ]
        whole = [each.clone().requires_grad_() for each in whole]
        toward = torch.cat([input_of(r, 100 + number) for r in range(world_size)])
        expected = (whole[0] @ whole[1].t()) @ whole[2].t()
        (expected * toward).sum().backward()

        column = nn.ColumnParallelLinear(INNER, COLUMNS, bias=False, device=device)
        row = nn.RowParallelLinear(COLUMNS, INNER, bias=False, device=device)
        column.load_state_dict({"weight": whole[1].detach()})
        row.load_state_dict({"weight": whole[2].detach()})
        x = input_of(rank, number).to(device).requires_grad_()
        output = row(column(x))
        (output * input_of(rank, 100 + number).to(device)).sum().backward()
        assert column.weight.grad is not None and row.weight.grad is not None
        for name, mine, full, dim in (
            ("output", output, expected, 0),
            ("gradient of the input", x.grad, whole[0].grad, 0),
            ("gradient of the columns", column.weight.grad, whole[1].grad, 0),
            ("gradient of the rows", row.weight.grad, whole[2].grad, 1),
        ):
            if not torch.equal(mine.detach().cpu(), full.detach().chunk(world_size, dim)[rank]):
                wrong.append(f"{name}, step {number}, rank {rank}")
    return wrong


def leaves_the_others(how: str) -> str:
    """Return the error of rank 0 after rank 1 has not called the second op."""
    device = interlace.device()
    x = torch.ones(1024, device=device)
    interlace.all_reduce(x)
    torch.cuda.synchronize()
    interlace.barrier()
    if interlace.get_rank() == 1:
        if how == "dies":
            os._exit(3)
        time.sleep(1e6)  # the run ends its process
    interlace.all_reduce(x)  # known, so nobody waits on the host
    try:
        torch.cuda.synchronize()
        interlace.all_reduce(x)
    except interlace.InterlaceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def mismatch() -> str:
    device = interlace.device()
    for length in (4, 5, 4):
        interlace.all_reduce(torch.ones(length, device=device))
    torch.cuda.synchronize()
    try:
        for length in (5 if interlace.get_rank() else 4, 4, 4, 4):
            interlace.all_reduce(torch.ones(length, device=device))
            torch.cuda.synchronize()
    except (ValueError, interlace.InterlaceError) as error:
        return str(error)
    return "nothing was raised"


def cupy_arrays() -> list[float]:
    """CuPy arrays as arguments, on torch's current stream."""
    import cupy

    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        x = cupy.full((16,), interlace.get_rank() + 1, dtype=cupy.float32)
        interlace.all_reduce(x)
        out = interlace.all_gather_matmul(
            cupy.ones((16, 16), dtype=cupy.float32), cupy.ones((16, 16), dtype=cupy.float32)
        )
        return [float(x.sum()), float(out.sum())]


def messages() -> list[float]:
    """Send and receive around the ring tensors that the stream has just made."""
    rank, world_size, device = interlace.get_rank(), interlace.get_world_size(), interlace.device()
    x, received = torch.zeros(1 << 16, device=device), torch.zeros(1 << 16, device=device)
    values = []
    for number in range(3):
        torch.cuda._sleep(NANOSECONDS)
        x.fill_(10 * number + rank)
        received.fill_(-1)
        sending = interlace.isend(x, (rank + 1) % world_size)
        receiving = interlace.irecv(received, (rank - 1) % world_size)
        x.fill_(-2)
        for work in (sending, receiving):
            assert work is not None
            work.wait()
        values.append(float((received * 1).mean()))
    return values


def futures() -> tuple[float, float]:
    """Return the values that a future's callback and its waiter get."""
    x = torch.ones(1 << 20, device=interlace.device())
    torch.cuda._sleep(50 * NANOSECONDS)
    work = interlace.all_reduce(x, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    return float(doubled.wait().mean()), float(work.get_future().wait()[0].mean())


def process_group(path: str) -> dict[str, Any]:
    """Run torch.distributed on tensors of both devices in one group, and interlace's ops in it."""
    import torch.distributed as dist

    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "interlace", init_method=f"file://{path}", rank=rank, world_size=world_size
    )
    try:
        on_gpu = torch.full((8,), rank + 1.0, device="cuda")
        on_cpu = torch.full((8,), rank + 1.0)
        dist.all_reduce(on_gpu)
        dist.all_reduce(on_cpu)
        work = dist.all_reduce(on_gpu, async_op=True)
        assert work is not None
        work.wait()
        gathered = torch.empty(world_size * 8, device="cuda")
        dist.all_gather_into_tensor(gathered, torch.full((8,), float(rank), device="cuda"))
        part = torch.empty(8, device="cuda")
        dist.reduce_scatter_tensor(part, gathered)
        x, w = input_of(rank, 2).cuda(), weight().cuda()
        product = interlace.all_gather_matmul(x, w, group=dist.group.WORLD, algorithm="fused")
        sub = dist.new_group(list(range(world_size)))
        dist.broadcast(on_gpu, 0, group=sub)
        dist.barrier()
        right = check("fused_gather", 2, product)
        return {
            "gpu": float(on_gpu[0]),
            "cpu": float(on_cpu[0]),
            "gathered": gathered[::8].tolist(),
            "part": float(part[0]),
            "product": right,
            "devices": sorted(each.type for each in dist.group.WORLD._device_types),  # type: ignore[union-attr]
        }
    finally:
        dist.destroy_process_group()
