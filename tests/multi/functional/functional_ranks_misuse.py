"""Ranks of test_functional.py: misuse, by one of them or all."""

import operator
from typing import Any

import torch

import interlace
from interlace import functional, nn
from interlace.functional import wait
from multi.functional.functional_ranks import Function, place, refusal


def misuse() -> dict[str, str]:
    """Every error that one rank makes and all must get; ops work again afterwards."""
    rank, size = place()
    x = torch.ones(4, 4)
    one, complete = rank == 1, torch.ops._c10d_functional.wait_tensor
    calls: dict[str, Function] = {
        "reduce_op": lambda: functional.all_reduce(x, "median" if one else "sum"),
        "reduce_op differs": lambda: functional.all_reduce(x, "max" if one else "sum"),
        "shape differs": lambda: functional.all_reduce(x[:3] if one else x),
        "gathered shape": lambda: functional.all_gather(x[:3] if one else x),
        "dtype differs": lambda: functional.all_reduce(x.double() if one else x),
        "gather_dim": lambda: functional.all_gather(x, 2 if one else 0),
        "scatter_dim": lambda: functional.reduce_scatter(x, "sum", -3 if one else 0),
        "not divisible": lambda: functional.reduce_scatter(x[:3] if one else x),
        "src": lambda: functional.broadcast(x, size if one else 0),
        "src differs": lambda: functional.broadcast(x, 1 if one else 0),
        "scatter src": lambda: functional.scatter(x, -5 if one else 0),
        "gather dst": lambda: functional.gather(x, 9 if one else 0),
        "splits": lambda: functional.all_to_all(x, [1, 1] if one else None, [4] if one else None),
        "permutation": lambda: functional.permute(x, [0, 0] if one else [1, 0]),
        "out shape": lambda: functional.all_gather(x, out=torch.ones(3, 3 if one else 4)),
        "out dtype": lambda: functional.all_reduce(
            x, out=torch.ones(4, 4, dtype=torch.float64 if one else torch.float32)
        ),
        "weight": lambda: functional.all_gather_matmul(x, x[:3] if one else x),
        "scattered": lambda: functional.matmul_reduce_scatter(x[:3] if one else x, x),
        "length": lambda: complete(
            torch.ops.interlace.matmul_reduce_scatter(
                x[:3], x, None, "sum", 0, 2, "auto", None, size, "0"
            )
        ),
        "length of rows": lambda: complete(
            torch.ops.interlace.reduce_scatter_norm(
                x[:3], *[None] * 4, "sum", 0, 2, "auto", "rms", 0.5, "", False, size, "0"
            )[0]
        ),
        "not an int": lambda: functional.all_gather(x, "a" if one else 0),  # type: ignore[arg-type]
        "not a tensor": lambda: functional.all_reduce([1.0] if one else x),  # type: ignore[arg-type]
        "no permutation": lambda: functional.permute(x, None if one else [1, 0]),  # type: ignore[arg-type]
        "no splits": lambda: functional.all_to_all(x, 7 if one else None),  # type: ignore[arg-type]
        "no weight": lambda: functional.all_gather_matmul(x, 3 if one else x),  # type: ignore[arg-type]
        "no bias": lambda: functional.matmul_all_reduce(x, x, bias="b" if one else None),  # type: ignore[arg-type]
        "no out": lambda: functional.all_gather(x, out=[1] if one else None),  # type: ignore[arg-type]
    }
    found = {}
    for name, call in calls.items():
        found[name] = refusal(call)
        assert wait(functional.all_reduce(x))[0, 0] == size, name
    return found


def misuse_in_graphs() -> dict[str, str]:
    """The same through the ops themselves, as a graph would call them."""
    rank, size = place()
    x = torch.ones(4, 4, requires_grad=True)
    one = rank == 1
    calls: dict[str, Function] = {
        "reduce_op": lambda: functional.all_reduce(x, "median" if one else "sum"),
        "shape differs": lambda: functional.all_reduce(x[:3] if one else x),
        "gather_dim": lambda: functional.all_gather(x, 2 if one else 0),
        "not divisible": lambda: functional.reduce_scatter(x[:3] if one else x),
        "src": lambda: functional.broadcast(x, size if one else 0),
        "weight": lambda: functional.all_gather_matmul(x, x[:3] if one else x),
    }
    found = {}
    for name, call in calls.items():
        found[name] = refusal(call)
        assert wait(functional.all_reduce(x))[0, 0] == size, name
    return found


def misuse_of_schemas(everywhere: bool) -> dict[str, str]:
    """What only a schema refuses, before an op has seen it: on rank 1, or on all."""
    rank, size = place()
    one = everywhere or rank == 1
    x, q = torch.ones(4, 4, requires_grad=True), torch.ones(1, 4, 2, 4, requires_grad=True)
    torch.manual_seed(0)  # the layer's weights are equal on all ranks, whatever ran before
    layer, token = nn.UlyssesAttention(4, 2), torch.ones(1, 2, 4)
    wrong: Any = [0, 4] if one else None
    text: Any = "x" if one else None
    calls: dict[str, Function] = {
        "cu_seqlens": lambda: nn.functional.context_parallel_attention(q, q, q, cu_seqlens=wrong),
        "cu_seqlens of heads": lambda: nn.functional.attention_of_heads(q, q, q, cu_seqlens=wrong),
        "cu_seqlens of a layer": lambda: layer(token, wrong),
        "scale": lambda: nn.functional.context_parallel_attention(q, q, q, scale=text),
        "lengths": lambda: functional.distributed_decode(token, (q, q), lengths=wrong),
        "block_table": lambda: functional.distributed_decode(token, (q, q), block_table=wrong),
        "algorithm": lambda: functional.all_gather_matmul(x, x, algorithm=wrong or "auto"),
        "out_dtype": lambda: functional.matmul_all_reduce(x, x, out_dtype=text),
    }
    found = {}
    for name, call in calls.items():
        found[name] = refusal(call)
        assert wait(functional.all_reduce(x))[0, 0] == size, name
    return found


def misuse_of_groups() -> dict[str, str]:
    """What every rank does wrong at once."""
    x = torch.ones(2)
    spec = interlace.GroupSpec("bound to two", 2)
    return {
        "size": refusal(lambda: interlace.GroupSpec("four", 4).bind("0")),
        "unbound": refusal(
            lambda: functional.all_reduce(x, group=interlace.GroupSpec("nowhere", 2))
        ),
        "traced": refusal(lambda: torch.ops.interlace.all_reduce(x, "sum", 7, "0")),
        "name": refusal(lambda: functional.all_reduce(x, group="nobody")),
        "lists": refusal(lambda: functional.all_reduce(x, group=[[0], [1, 2]])),
        "traced lists": refusal(
            lambda: functional.all_reduce(x.requires_grad_(), group=[[0], [1, 2]])
        ),
        "tag": refusal(lambda: functional.all_reduce(x, group="0", tag="fast")),
        "tag of a spec": refusal(lambda: functional.all_reduce(x, group=spec, tag="fast")),
        "type": refusal(lambda: functional.all_reduce(x, group=3.5)),
    }


def first_used_in_operators() -> list[str]:
    """Tensor's operators take a TypeError for "not implemented"; what the op said must not be lost."""
    rank, _ = place()
    x = torch.ones(2, dtype=torch.float64 if rank else torch.float32)
    weight = torch.nn.Parameter(torch.ones(2))

    def reduced() -> torch.Tensor:
        return functional.all_reduce(x)

    return [
        refusal(lambda: reduced() == x),
        refusal(lambda: x < reduced()),
        refusal(lambda: reduced() * 2),
        refusal(lambda: 2 / reduced()),
        refusal(lambda: x - reduced()),
        refusal(lambda: weight + reduced()),
        refusal(lambda: torch.ones(2) @ reduced()),
        refusal(lambda: operator.iadd(reduced(), x)),
        refusal(lambda: operator.ipow(x.clone(), reduced())),
        refusal(lambda: operator.and_(True, reduced())),
        refusal(lambda: -reduced()),
        refusal(lambda: reduced().sum()),
        refusal(lambda: reduced()[0]),
    ]


def operators() -> None:
    """They are Tensor's, bit by bit, whichever side of them waits, or both."""
    x, numbers = torch.tensor([3.0, -7.0, 0.3]), torch.tensor([12, 5, 3])
    names = "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"
    bits = "lshift", "rshift", "and_", "or_", "xor"
    for name in (*names, "eq", "ne", "lt", "le", "gt", "ge", *bits):
        op, own = getattr(operator, name), numbers if name in bits else x
        other = own.flip(0)
        whole, right = functional.all_reduce(own, "max"), functional.all_reduce(other, "max")
        for made in (op(whole, other), op(own, right), op(whole, right)):
            torch.testing.assert_close(made, op(own, other), rtol=0, atol=0, equal_nan=True)
        if name != "matmul":
            torch.testing.assert_close(op(whole, 2), op(own, 2), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(op(2, whole), op(2, own), rtol=0, atol=0, equal_nan=True)


def inference() -> list[float]:
    """Sums of what ops give in inference mode, those whose work is done in a thread of its own too."""
    with torch.inference_mode():
        x = torch.ones(4, 4)
        made = [
            functional.all_gather(x, 1),
            functional.all_gather_matmul(x, x),
            functional.matmul_reduce_scatter(x, x),
            functional.matmul_all_reduce(x, x),
        ]
        return [float(each.sum()) for each in made]


def around_the_dispatcher() -> tuple[list[float], str, str]:
    """Through DLPack, in a format string, and shapes that change in place."""
    y = functional.all_gather(torch.ones(2, 2))
    text = f"{functional.all_reduce(torch.tensor(1.0)):.2f}"
    return torch.from_dlpack(y).flatten().tolist(), text, refusal(lambda: y.t_())
