"""interlace.tensor.Placeholder: what it says, what it infers, what it refuses, what it lets through."""

import copy
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace.tensor import Placeholder, PlaceholderError, placeholder
from interlace.tensor.placeholder import FORMER
from ranks import ranks


def there(*shape: int, **options: Any) -> Placeholder:
    return Placeholder(shape or (3, 4), ranks=[2], **options)


def test_it_says_what_it_stands_for_and_takes_no_memory() -> None:
    large = there(1 << 20, 1 << 10, dtype=torch.bfloat16, requires_grad=True)
    assert isinstance(large, torch.Tensor) and large.is_leaf and large.requires_grad
    assert large.shape == (1 << 20, 1 << 10) and large.dtype == torch.bfloat16
    assert large.device.type == "cpu" and large.ranks == (2,)
    assert (
        large.untyped_storage().nbytes() == 0 and (large @ large.T).untyped_storage().nbytes() == 0
    )
    assert there(device="cuda:1").to(torch.float16).device == torch.device("cuda", 1)
    text = "Placeholder(shape=(3, 4), dtype=torch.float32, device=cpu, ranks=(2,))"
    assert repr(there()) == str(there()) == f"{there()}" == text
    assert repr(there(requires_grad=True))[:-1].endswith("requires_grad=True")


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save({"there": value}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["there"]


def renamed_and_loaded(value: Any) -> Any:
    """Load it as from a checkpoint that names the file ``tensor/uneven/placeholder.py``."""
    file = io.BytesIO()
    with (
        mock.patch.dict(
            sys.modules, {FORMER.rpartition(".")[0]: sys.modules[Placeholder.__module__]}
        ),
        mock.patch.object(placeholder._rebuilt, "__module__", FORMER.rpartition(".")[0]),
    ):
        torch.save({"there": value}, file)
    assert FORMER.rpartition(".")[0].encode() in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=True)["there"]


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), saved_and_loaded, renamed_and_loaded],
)
def test_copies(copied: Callable[[Any], Any]) -> None:
    made = copied(there(dtype=torch.float64, requires_grad=True))
    assert type(made) is Placeholder and made.requires_grad and made.ranks == (2,)
    assert made.shape == (3, 4) and made.dtype == torch.float64


INFERRED: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "matmul": lambda t: t @ torch.ones(4, 7),
    "right matmul": lambda t: torch.ones(2, 3) @ t,
    "view": lambda t: t.view(2, 6)[1:].T,
    "split": lambda t: t.split([1, 3], 1),
    "cat": lambda t: torch.cat([t, torch.ones(2, 4)]),
    "to": lambda t: t.to(torch.float64) + 1,
    "mean": lambda t: t.mean(0, keepdim=True),
    "layer_norm": lambda t: torch.nn.functional.layer_norm(t, (4,)),
    "cross_entropy": lambda t: torch.nn.functional.cross_entropy(t, torch.tensor([0, 1, 3])),
    "where": lambda t: torch.where(t > 0, t, -t),
    "topk": lambda t: t.topk(2),
    "new": lambda t: [t.new_zeros(2), torch.empty_like(t, dtype=torch.int32), t.clone()],
    "in place": lambda t: t.clone().add_(1).mul_(t),
}


@pytest.mark.parametrize("name", INFERRED)
def test_arithmetic_infers_what_torch_gives(name: str) -> None:
    function = INFERRED[name]
    found, wanted = function(there()), function(torch.randn(3, 4))
    if isinstance(wanted, torch.Tensor):
        found, wanted = [found], [wanted]
    for each, right in zip(found, wanted, strict=True):
        assert type(each) is Placeholder and each.ranks == (2,)
        assert (each.shape, each.dtype, each.device) == (right.shape, right.dtype, right.device)


def test_shapes_that_do_not_fit_are_errors_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="broadcast"):
        there() + torch.ones(7)


def test_what_is_made_of_several_is_valid_where_all_are() -> None:
    one, two = Placeholder((2,), ranks=[0, 1, 2]), Placeholder((2,), ranks=[2, 1, 5])
    assert (one + two).ranks == (1, 2) and (one + torch.ones(2)).ranks == (0, 1, 2)


READ: dict[str, Callable[[Placeholder], Any]] = {
    "item": lambda t: t[0, 0].item(),
    "float": lambda t: float(t.sum()),
    "bool": lambda t: bool((t > 0).all()),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "array": lambda t: t.__array__(),
    "dlpack": lambda t: torch.from_dlpack(t),  # type: ignore[attr-defined]
    "data_ptr": lambda t: t.data_ptr(),
    "equal": lambda t: torch.equal(t, t),
    "nonzero": lambda t: t.nonzero(),
    "unique": lambda t: t.unique(),
    "masked": lambda t: t[t > 0],
    "into data": lambda t: torch.ones(3, 4).add_(t),
    "copied into data": lambda t: torch.ones(3, 4).copy_(t),
    "reshaped in place": lambda t: t.t_(),
}


@pytest.mark.parametrize("name", READ)
def test_reading_is_an_error_that_says_where_the_value_is(name: str) -> None:
    with pytest.raises(PlaceholderError, match=r"has no data here; its value is on ranks \[2\]"):
        READ[name](there())


def test_gradients_flow_to_placeholders_and_to_nothing_that_has_data() -> None:
    start = there(requires_grad=True)
    linear = torch.nn.Linear(4, 2)
    seen: list[Any] = []
    middle = start * 2
    middle.register_hook(seen.append)
    loss = linear(middle).relu().sum()
    assert loss.requires_grad
    loss.backward()
    assert type(start.grad) is Placeholder and start.grad.shape == (3, 4)
    assert [type(each) for each in seen] == [Placeholder]
    assert linear.weight.grad is None and linear.bias.grad is None
    (again,) = torch.autograd.grad(start.sin().sum(), start)
    assert type(again) is Placeholder
    with torch.no_grad():
        assert not (start + 1).requires_grad
    assert not start.detach().requires_grad


COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda t: interlace.all_reduce(t),
    "broadcast": lambda t: interlace.broadcast(t, 0),
    "scatter": lambda t: interlace.scatter(t, None, 0),
    "functional": lambda t: interlace.functional.all_reduce(t, group="0"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@ranks(place="sim")
def test_other_collectives_refuse_it_on_all_ranks(name: str) -> None:
    rank = interlace.get_rank()
    tensor = there(4) if rank == 1 else torch.ones(4)
    with pytest.raises(TypeError, match="Placeholder"):
        if name == "scatter" and rank == 0:
            interlace.scatter(tensor, [torch.ones(4)] * 2, 0)
        else:
            interlace.functional.wait(COLLECTIVES[name](tensor))
