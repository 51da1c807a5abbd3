"""Parameters of interlace.nn: what a rank holds, how it starts, state dicts, misuse. No gradients here."""

import copy
import inspect
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import interlace
from interlace import nn as inn
from interlace.nn.linear import LinearOptions
from ranks import ranks
from support import failure

LAYERS_AND_TORCHS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "column": (lambda: inn.ColumnParallelLinear(5, 12), lambda: nn.Linear(5, 12)),
    "row": (lambda: inn.RowParallelLinear(12, 5), lambda: nn.Linear(12, 5)),
    "embedding": (lambda: inn.VocabParallelEmbedding(5, 3), lambda: nn.Embedding(5, 3)),
    "norm": (lambda: inn.LayerNorm(4), lambda: nn.LayerNorm(4)),
    "scale": (lambda: inn.RMSNorm((2, 3)), lambda: nn.RMSNorm((2, 3))),
}


def sharded(seed: int = 5) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({name: make() for name, (make, _) in LAYERS_AND_TORCHS.items()})


def unsharded(seed: int = 5) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({name: make() for name, (_, make) in LAYERS_AND_TORCHS.items()})


def check_same(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def check_group(model: nn.ModuleDict, group: Any) -> None:
    assert all(each.sharding.group is group for each in model.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@ranks(place="sim")
def test_initialisation_and_state_dicts_are_those_of_the_unsharded_layers(world_size: int) -> None:
    expected = unsharded()
    drawn = torch.rand(1)
    model = sharded()
    assert torch.equal(torch.rand(1), drawn)
    whole = inn.full_state_dict(model)
    check_same(whole, expected.state_dict())
    unsharded(6).load_state_dict(whole, strict=True)
    for source in (model.state_dict(), expected.state_dict()):
        for assign in (False, True):
            other = sharded(8)
            other.load_state_dict(copy.deepcopy(source), strict=True, assign=assign)
            check_same(other.state_dict(), model.state_dict())
            check_group(other, model["row"].group)


@ranks(4, place="sim")
def test_what_ranks_hold() -> None:
    shapes = {key: list(value.shape) for key, value in sharded().state_dict().items()}
    assert shapes["embedding.weight"] == [[2, 3], [2, 3], [1, 3], [0, 3]][interlace.get_rank()]
    assert shapes["column.weight"] == [3, 5] and shapes["column.bias"] == [3]
    assert shapes["row.weight"] == [5, 3] and shapes["row.bias"] == [5]


@ranks(3, place="sim")
def test_the_whole_on_one_rank() -> None:
    found = inn.full_state_dict(sharded(), group_dst=2)
    check_same(found, unsharded().state_dict() if interlace.get_rank() == 2 else {})


@ranks(place="sim")
def test_state_dicts_of_other_shapes_or_keys_are_refused() -> None:
    layer, rank = inn.ColumnParallelLinear(3, 8, bias=False), interlace.get_rank()
    before = layer.weight.detach().clone()
    text = f"got shape (5, 3); rank {rank} of 2 accepts its part, (4, 3), or the whole, (8, 3)."
    with pytest.raises(
        RuntimeError, match=re.escape(f"size mismatch for weight: {text}")
    ) as caught:
        layer.load_state_dict({"weight": torch.zeros(5, 3)})
    assert str(caught.value).count("size mismatch") == 1 and torch.equal(layer.weight, before)
    for rows in (4, 8):
        layer.load_state_dict({"weight": torch.zeros(rows, 3)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"'):
        inn.RowParallelLinear(4, 2).load_state_dict({"weight": torch.zeros(2, 4)})


@ranks(3, place="sim")
def test_made_without_memory_and_filled_later() -> None:
    with torch.device("meta"):
        model = sharded()
    assert all(value.is_meta for value in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for layer in model.values():
        layer.reset_parameters()
    check_group(model, model["row"].group)
    check_same(model.state_dict(), sharded().state_dict())


@ranks(place="sim")
def test_copies_share_the_group_and_pickles_are_refused() -> None:
    model = sharded()
    other = copy.deepcopy(model)
    with torch.no_grad():
        model["row"].weight.zero_()
    check_group(other, model["row"].group)
    with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
        pickle.dumps(model)
    check_same(inn.full_state_dict(other), unsharded().state_dict())


SIZES: list[tuple[Callable[[], Any], str]] = [
    (lambda: inn.ColumnParallelLinear(4, 6), "out_features must be a positive multiple of the"),
    (lambda: inn.RowParallelLinear(6, 4), "in_features must be a positive multiple of the"),
    (lambda: inn.SequenceParallelMLP(4, 6), "intermediate_size must be a positive multiple of"),
    (lambda: inn.SequenceParallelMLP(4, 8, "tanh"), "activation must be None or one of"),
    (lambda: inn.QKVParallelLinear(8, 6), "num_heads must be a positive multiple of the"),
    (lambda: inn.QKVParallelLinear(24, 12, 3), "num_kv_heads must be a multiple or a divisor"),
    (lambda: inn.QKVParallelLinear(8, 8, 3), "num_kv_heads must divide num_heads 8, got 3"),
    (lambda: inn.QKVParallelLinear(9, 8), "hidden_size 9 is not a multiple of num_heads 8"),
    (lambda: inn.VocabParallelEmbedding(4, 2, 4), "padding_idx must be within -4..3, got 4"),
    (lambda: inn.ColumnParallelLinear(4, 8.0), "out_features must be an int, got 8.0"),  # type: ignore[arg-type]
    (lambda: inn.SequenceParallelMLP(-32, 8), "hidden_size must be positive, got -32"),
    (lambda: inn.SequenceParallelMLP("32", 8), "hidden_size must be an int, got '32'"),  # type: ignore[arg-type]
    (lambda: inn.ColumnParallelLinear(0, 8), "in_features must be positive, got 0"),
    (lambda: inn.QKVParallelLinear(8, 8, 0), "num_kv_heads must be positive, got 0"),
    (lambda: inn.VocabParallelEmbedding(4, 0), "embedding_dim must be positive, got 0"),
    (
        lambda: inn.SequenceParallelMLP(4, 8)(torch.ones(2, 5)),
        "input must have 4 features, hidden_size, got shape (2, 5)",
    ),
    (
        lambda: inn.ColumnParallelLinear(4, 8)(torch.ones(2, 5)),
        "input must have 4 features, in_features, got shape (2, 5)",
    ),
    (
        lambda: inn.RowParallelLinear(8, 4)(torch.ones(4, 8)),
        "input must have 2 features, in_features 8 over 4 ranks, got shape (4, 8)",
    ),
    (
        lambda: inn.QKVParallelLinear(8, 4)(torch.ones(4, 1, 7)),
        "input must have 8 features, hidden_size, got shape (4, 1, 7)",
    ),
    (
        lambda: inn.SequenceParallelMLP(4, 8)(torch.ones(2 + interlace.get_rank(), 4)),
        "input must be equally long on all ranks along dimension 0, lengths by rank are [2, 3, 4, 5]",
    ),
    (
        lambda: inn.RowParallelLinear(8, 2, bias=False)(torch.ones(3, 2)),
        "dimension 0 of input has length 3, which the group's size 4 does not divide",
    ),
]


@pytest.mark.parametrize("make, text", SIZES)
def test_sizes_that_do_not_fit(make: Callable[[], Any], text: str) -> None:
    error = failure(make, 4)
    assert isinstance(error, (ValueError, TypeError)) and text in str(error)


@pytest.mark.parametrize("what", ["range", "dtype", "length"])
@ranks(place="sim")
def test_indices_that_do_not_fit(what: str) -> None:
    x, wrong = torch.zeros(4, dtype=torch.int64), interlace.get_rank() == 1
    of_range = IndexError if wrong else ValueError
    kind, text, other = {
        "range": (of_range, "input must be within 0..4, got 5..5", x + 5),
        "dtype": (TypeError, "must be an int32 or int64 tensor, got torch.float32", x.float()),
        "length": (ValueError, "the group's size 2 must divide the length 3 of dim 0", x[:3]),
    }[what]
    with torch.no_grad(), pytest.raises(kind, match=re.escape(text)):
        inn.VocabParallelEmbedding(5, 2)(other if wrong or what == "length" else x)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda rank: inn.RowParallelLinear(4 + rank, 4), "in_features .* got 5"),
        (lambda rank: inn.SequenceParallelMLP(4, 4, ("relu", "tanh")[rank]), "activation .*tanh"),
        (lambda rank: inn.VocabParallelEmbedding(4, 2, 3 + rank), "padding_idx .* got 4"),
    ],
)
@ranks(place="sim")
def test_what_one_rank_cannot_make_all_are_told(make: Callable[[int], Any], text: str) -> None:
    """The other ranks have made their parameters, and get the error when they first communicate."""
    with pytest.raises(ValueError, match=text) as caught:
        make(interlace.get_rank())
        interlace.barrier()
    said, told = str(caught.value), "rank 1 cannot take part: "
    assert said.endswith(" (on rank 1)") if interlace.get_rank() else told in said, said


@pytest.mark.parametrize(
    "make",
    [
        lambda: inn.ColumnParallelLinear(4, 4, batch_first=True),
        lambda: inn.RowParallelLinear(8, 4),
        lambda: inn.SequenceParallelMLP(4, 4),
        lambda: inn.QKVParallelLinear(4, 2, 1),
    ],
)
@ranks(place="sim")
def test_what_is_no_tensor_on_one_rank_all_are_told(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    layer = make()
    with torch.no_grad(), pytest.raises(TypeError, match="input must be a tensor, got NoneType"):
        layer(None if interlace.get_rank() == 1 else torch.ones(2, 2, 4))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("activation", "LookupError: not today"),
        ("rotary", "LookupError: not today"),
        ("rotary, heads apart", "LookupError: not today"),
        ("router", "RuntimeError: mat1 and mat2 shapes"),
        ("scalar", "input must have 4 features, got a scalar"),
    ],
)
@ranks(place="sim")
def test_what_fails_in_the_middle_of_a_layer_on_one_rank_fails_on_all(kind: str, text: str) -> None:
    torch.manual_seed(1)
    wrong = interlace.get_rank() == 1

    def own(x: torch.Tensor, *others: torch.Tensor) -> Any:
        if wrong:
            raise LookupError("not today")
        return (x, others[0]) if others else x

    moe, x = inn.MoE(4, 4, 2, 1), torch.ones(1, 2, 4)
    moe(x)  # parameters are compared, once
    if wrong:
        moe.router.data = torch.ones(2, 3)
    run: dict[str, Callable[[], Any]] = {
        "activation": lambda: inn.SequenceParallelMLP(4, 4, own)(x),
        "rotary": lambda: inn.UlyssesAttention(4, 2)(x, rotary=own),
        "rotary, heads apart": lambda: inn.UlyssesAttention(4, 1)(x, rotary=own),
        "router": lambda: moe(x),
        "scalar": lambda: moe(torch.tensor(1.0) if wrong else x),
    }
    told = text.rpartition(": ")[2] if wrong else f"rank 1 cannot take part: {text}"
    with torch.no_grad(), pytest.raises((ValueError, LookupError, RuntimeError), match=told):
        run[kind]()
    total = torch.ones(1)
    interlace.all_reduce(total)
    assert total.item() == 2


def test_copies_are_of_tensors() -> None:
    error = failure(lambda: inn.copy_to_group("weight"), 1)  # type: ignore[arg-type]
    assert isinstance(error, TypeError)
    assert "tensors must be tensors or None, got str (on rank 0)" in str(error)


def after_steps(make: Callable[..., torch.optim.Optimizer], asked: bool) -> torch.Tensor:
    layer = inn.LayerNorm(3)
    optimizer = make(layer.parameters())
    if asked:
        inn.sharded_optimizer_state_dict(layer, optimizer)
    for step in range(3):
        for parameter in layer.parameters():
            parameter.grad = torch.arange(3.0) + 1 + step
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in layer.parameters()])


@pytest.mark.parametrize(
    "make",
    [
        lambda own: torch.optim.AdamW(own, lr=0.1, amsgrad=True),
        lambda own: torch.optim.Adam(own, lr=torch.tensor(0.1), weight_decay=0.1, foreach=False),
        lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda own: torch.optim.RMSprop(own, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda own: torch.optim.Rprop(own, lr=0.1),
        lambda own: torch.optim.NAdam(own, lr=0.1),
    ],
)
def test_asking_for_the_state_of_a_new_optimizer_changes_nothing(make: Any) -> None:
    (plain,) = interlace.run(after_steps, 1, make, False)
    (asked,) = interlace.run(after_steps, 1, make, True)
    assert torch.equal(plain, asked)


@ranks(1, place="sim")
def test_damped_momentum_that_has_not_begun_has_no_state() -> None:
    """torch's first step is undamped, which no initial tensor could reproduce."""
    layer = inn.LayerNorm(3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ValueError, match=r"momentum=0.9 with dampening=0.5 .* make a step"):
        inn.sharded_optimizer_state_dict(layer, optimizer)
    assert not optimizer.state
    for parameter in layer.parameters():
        parameter.grad = torch.ones(3)
    optimizer.step()
    state = inn.sharded_optimizer_state_dict(layer, optimizer)
    assert state["weight.momentum_buffer"].tolist() == [1.0] * 3


LAYERS: dict[str, Callable[[], Any]] = {
    "bias of RowParallelLinear has other values": lambda: inn.RowParallelLinear(4, 2),
    "RowParallelLinear was initialised": lambda: inn.RowParallelLinear(4, 2, bias=False),
    "ColumnParallelLinear was initialised": lambda: inn.ColumnParallelLinear(2, 8),
    "QKVParallelLinear was initialised": lambda: inn.QKVParallelLinear(2, 4, 2, head_dim=2),
    "VocabParallelEmbedding was initialised": lambda: inn.VocabParallelEmbedding(5, 2),
    "SequenceParallelMLP was initialised": lambda: inn.SequenceParallelMLP(
        2, 8, output_init_method=torch.nn.init.zeros_
    ),
    "router of MoE has other values": lambda: inn.MoE(2, 2, 4, 1),
    "q.weight of UlyssesAttention has other values": lambda: inn.UlyssesAttention(
        2, 4, head_dim=2, layout="sbhd"
    ),
    "ColumnParallelLinear was initialised from": lambda: copy.deepcopy(
        inn.ColumnParallelLinear(2, 8)
    ),
}


@pytest.mark.parametrize("text", LAYERS)
def test_ranks_that_start_differently_are_told(text: str) -> None:
    def on_rank(loaded: str) -> str:
        torch.manual_seed(interlace.get_rank())
        layer = LAYERS[text]()
        input = torch.zeros(4, dtype=torch.int64) if "Embedding" in text else torch.ones(4, 2)
        input = torch.ones(4, 1, 2) if "Attention" in text else input
        if loaded:  # whatever it was initialised from, until it is again
            with torch.no_grad():
                for each in layer.parameters():
                    (each if loaded == "in place" else each.data).zero_()
                layer(input)
                for each in layer.modules():
                    getattr(each, "reset_parameters", lambda: None)()
        try:
            layer(input)
        except ValueError as error:
            return str(error)
        return "nothing"

    for said in interlace.run(on_rank, 2, ""):
        assert said.startswith(text) and "on rank 1 of the group than on rank 0" in said
    told = (interlace.run(on_rank, 2, how) for how in ("in place", "by .data"))
    for said in itertools.chain(*told):
        assert said == "nothing" if "Attention" in text else said.startswith(text)


@pytest.mark.parametrize("text", [text for text in LAYERS if "Embed" not in text])
def test_an_input_of_another_dtype_is_told_in_words_of_the_layer(text: str) -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        LAYERS[text]()(torch.ones(4, 1, 2, dtype=torch.bfloat16))

    (layer,) = re.findall("[A-Z][A-Za-z]+", text)
    found = str(failure(on_rank, 2))
    (name,) = re.findall(
        rf"input is torch.bfloat16, (\S+) of {layer} (?:is|are) torch.float32", found
    )
    parts = {"QKVParallelLinear": "q.weight", "SequenceParallelMLP": "up.weight", "MoE": "up"}
    assert name == parts.get(layer, "weights" if layer == "UlyssesAttention" else "weight")


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (inn.ColumnParallelLinear, "input_is_parallel"),
        (inn.RowParallelLinear, "save_gathered"),
        (inn.SequenceParallelMLP, "out_dtype"),
        (inn.QKVParallelLinear, "gather_output"),
    ],
)
@ranks(place="sim")
def test_linear_layers_show_what_they_take_and_take_nothing_else(kind: Any, other: str) -> None:
    parameters = inspect.signature(kind).parameters
    shared = inspect.signature(LinearOptions).parameters
    assert all(parameters[name].default == each.default for name, each in shared.items())
    assert other not in parameters and "options" not in parameters

    sizes = (8, 4) if kind is inn.QKVParallelLinear else (4, 8)
    kind(*sizes, **{name: each.default for name, each in shared.items()})
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\.__init__\(\) .*'{other}'$"):
        kind(*sizes, **{other: None})


@pytest.mark.parametrize("world_size", [1, 3])
@ranks(place="sim")
def test_a_scalar_is_summed_over_a_group_and_its_gradient_is_not(world_size: int) -> None:
    rank, weight = interlace.get_rank(), torch.tensor(2.0, requires_grad=True)
    total = inn.reduce_from_group(weight * (rank + 1))
    total.backward()
    assert weight.grad is not None and weight.grad.item() == rank + 1.0
    assert total.item() == 2.0 * sum(range(1, world_size + 1))
