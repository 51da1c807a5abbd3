"""Wrong arguments and outputs of functional ops: refused by their names, also before the schema is read."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace import experts, functional, nn
from interlace.ops.library import OPS, WITH_OUT
from interlace.ops.op import calls
from interlace.ops.op.op import Op
from ranks import ranks

LIST = pathlib.Path(__file__).with_name("schemas.txt")
TAKEN: dict[str, Any] = {
    "Tensor": torch.ones(1), "str": "", "bool": False, "float": 1.0, "int": 0, "SymInt": 0,
}  # fmt: skip


def taken(kind: str) -> Any:
    """Return the types of arguments that a schema accepts for that kind."""
    return None if kind.endswith("?") else [] if kind.endswith("[]") else TAKEN[kind]


def schemas() -> list[str]:
    """Return all schemas of ``torch.ops.interlace``, also those that write into ``out`` or their input."""
    names = [f"{op.name}{form}" for op in OPS for form in ("", "_out", "_")]
    there = [name for name in ("group_size", *names) if hasattr(torch.ops.interlace, name)]
    return [str(getattr(torch.ops.interlace, name).default._schema) for name in there]


def test_schemas_are_those_of_saved_graphs() -> None:
    """A program that torch has exported refers to ops by their schemas."""
    assert schemas() == LIST.read_text().splitlines(), "python tests/sim/functional/test_schemas.py"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@ranks(1, place="sim")
def test_every_argument_is_named(op: Op) -> None:
    for at, name in enumerate(op.kinds):
        given = [taken(kind) for kind in op.kinds.values()]
        given[at] = object()
        with pytest.raises(TypeError, match=f"^{re.escape(name)} must be a.*, got object"):
            calls.call(op.name, *given, 1, "0")
        if op.name in WITH_OUT:
            with pytest.raises(TypeError, match=f"^{re.escape(name)} must be a.*, got object"):
                calls.call_out(op.name, *given, 1, "0", out=torch.ones(1))


WRONG: Any = torch.ones(2)  # no check may ask whether it is true
ROWS, CHOSEN, EXPERT = torch.ones(2, 4), torch.tensor([[0, 1], [1, 0]]), torch.ones(1, 4, 4)
Given = dict[str, Any]


def sent(there: Any, how: Given) -> Any:
    return there.dispatch(**{"x": ROWS, "topk_idx": CHOSEN, "topk_weights": None, **how})


def combined(there: Any, how: Given) -> Any:
    received, handle = sent(there, {"num_experts": 2})
    return there.combine(received.x, handle, **how)


def grouped(there: Any, how: Given) -> Any:
    return there.all_to_all_grouped_matmul(ROWS, EXPERT, [1, 1], [1, 1], **how)


def normed(there: Any, how: Given) -> Any:
    how = {"norm": interlace.RMSNorm(), **how}
    return there.matmul_all_reduce(ROWS.clone().requires_grad_(), EXPERT[0], **how)


def scattered(there: Any, how: Given) -> Any:
    return there.reduce_scatter_norm(ROWS, norm=interlace.RMSNorm(), **how)


def attended(there: Any, how: Given) -> Any:
    heads = torch.ones(1, 2, 2, 4, requires_grad=True)
    return (there or nn.functional.context_parallel_attention)(heads, heads, heads, **how)


def decoded(_: Any, how: Given) -> Any:
    cache = torch.ones(1, 4, 2, 4)
    return functional.distributed_decode(torch.ones(1, 2, 4), (cache, cache), **how)


def of_a_layer(_: Any, how: Given) -> Any:
    torch.manual_seed(0)
    return nn.UlyssesAttention(4, 2)(torch.ones(1, 2, 4), **how)


OTHERS: list[tuple[Any, Any, Given, str]] = [
    (combined, experts, {"weighted": WRONG}, "weighted must be a bool"),
    (combined, functional, {"weighted": WRONG}, "weighted must be a bool"),
    (grouped, interlace, {"return_received": WRONG}, "return_received must be a bool"),
    (grouped, functional, {"return_received": WRONG}, "return_received must be a bool"),
    (grouped, functional, {"out_dtype": "half"}, "out_dtype must be a torch.dtype"),
    (normed, interlace, {"activation": WRONG}, "activation must be"),
    (normed, functional, {"out_dtype": "half"}, "out_dtype must be a torch.dtype"),
    (scattered, interlace, {"scatter_dim": None}, "scatter_dim must be an int"),
    (scattered, interlace, {"scatter_dim": WRONG}, "scatter_dim must be an int"),
    (sent, functional, {"num_experts": 2, "x": [ROWS]}, "x must be a tensor or a pair"),
    (sent, functional, {"num_experts": 2, "topk_weights": 1}, "topk_weights must be a tensor"),
    (sent, experts, {"num_experts": 0}, "num_experts must be positive"),
    (attended, None, {"scale": True}, "scale must be a number"),
    (attended, None, {"scale": "x"}, "scale must be a number"),
    (attended, None, {"cu_seqlens": [0, 4]}, "cu_seqlens must be a tensor"),
    (
        attended, nn.functional.attention_of_heads, {"cu_seqlens": [0, 4]},
        "cu_seqlens must be a tensor",
    ),
    (of_a_layer, None, {"cu_seqlens": [0, 4]}, "cu_seqlens must be a tensor"),
    (decoded, None, {"lengths": [0, 4]}, "lengths must be a tensor"),
    (decoded, None, {"block_table": [0, 4]}, "block_table must be a tensor"),
]  # fmt: skip


@pytest.mark.parametrize("place", ["sim", "shm"])
@ranks()
def test_what_is_asked_before_the_schema_is_refused_on_all(place: str) -> None:
    for call, there, how, text in OTHERS if place == "sim" else OTHERS[-6:]:
        right: Given = {"num_experts": 2} if call is sent else {}
        with pytest.raises((TypeError, ValueError), match=text) as caught:
            call(there, how if interlace.get_rank() else right)
        assert "rank 1" in str(caught.value)
        total = torch.ones(1)
        interlace.all_reduce(total)
        assert total == 2, text


@ranks(2, place="sim")
def test_an_eager_combine_takes_what_functional_forms_have_dispatched() -> None:
    received, handle = sent(functional, {"num_experts": 2})
    product = interlace.grouped_matmul_combine(received.x, EXPERT, handle)
    assert (experts.combine(received.x, handle) + product)[:, 0].tolist() == [10.0, 10.0]


def with_a_gradient_on_one_rank() -> Any:
    x = torch.ones(4, requires_grad=interlace.get_rank() == 1)
    return functional.all_reduce(x, out=torch.empty(4))


def expanded_on_one_rank() -> Any:
    one = interlace.get_rank() == 1
    return functional.all_reduce(
        torch.ones(4), out=torch.empty(1).expand(4) if one else torch.empty(4)
    )


def overlapping() -> Any:
    memory = torch.zeros(8)
    return functional.broadcast(memory[:6], 1, out=memory[2:])


@pytest.mark.parametrize("place", ["sim", "shm"])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (with_a_gradient_on_one_rank, "has no gradient"),
        (expanded_on_one_rank, "single memory location"),
        (overlapping, "single memory location"),
    ],
)
@ranks(2)
def test_all_ranks_refuse(place: str, call: Callable[[], Any], words: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=words):
        functional.wait(call())
    assert functional.wait(functional.all_reduce(torch.ones(1))).item() == 2


if __name__ == "__main__":
    LIST.write_text("\n".join(schemas()) + "\n")
