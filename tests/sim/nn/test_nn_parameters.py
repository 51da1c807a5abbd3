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
from interlace import functional, nn as inn
from interlace.nn.linear import LinearOptions
from ranks import ranks
from support import failure

WORLDS = [1, 2, 3, 4]


def layers() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]]:
    """By name: the layer, the unsharded one."""
    return {
        "column": (lambda: inn.ColumnParallelLinear(5, 12), lambda: nn.Linear(5, 12)),
        "row": (lambda: inn.RowParallelLinear(12, 5), lambda: nn.Linear(12, 5)),
        "embedding": (lambda: inn.VocabParallelEmbedding(5, 3), lambda: nn.Embedding(5, 3)),
        "norm": (lambda: inn.LayerNorm(4), lambda: nn.LayerNorm(4)),
        "scale": (lambda: inn.RMSNorm((2, 3)), lambda: nn.RMSNorm((2, 3))),
    }


def sharded() -> nn.ModuleDict:
    torch.manual_seed(5)
    return nn.ModuleDict({name: make() for name, (make, _) in layers().items()})


def unsharded(seed: int = 5) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({name: make() for name, (_, make) in layers().items()})


def same(found: Any, expected: Any) -> bool:
    return list(found) == list(expected) and all(
        torch.equal(found[key], value) for key, value in expected.items()
    )


def states() -> None:
    """Its own parts, the whole, and back."""
    model, expected = sharded(), unsharded()
    drawn = torch.rand(1)
    torch.manual_seed(5)
    sharded()
    assert torch.equal(torch.rand(1), drawn)
    whole = inn.full_state_dict(model)
    assert same(whole, expected.state_dict())
    unsharded(6).load_state_dict(whole, strict=True)
    for source in (model.state_dict(), expected.state_dict()):
        for assign in (False, True):
            torch.manual_seed(8)
            other = nn.ModuleDict({name: make() for name, (make, _) in layers().items()})
            other.load_state_dict(copy.deepcopy(source), strict=True, assign=assign)
            assert same(other.state_dict(), model.state_dict())
            assert all(value.sharding.group is model["row"].group for value in other.parameters())


@pytest.mark.parametrize("world_size", WORLDS)
def test_initialisation_and_state_dicts_are_those_of_the_unsharded_layers(world_size: int) -> None:
    interlace.run(states, world_size)


def parts() -> dict[str, list[int]]:
    return {key: list(value.shape) for key, value in sharded().state_dict().items()}


def test_what_ranks_hold() -> None:
    found = interlace.run(parts, 4)
    assert [each["embedding.weight"] for each in found] == [[2, 3], [2, 3], [1, 3], [0, 3]]
    for each in found:
        assert each["column.weight"] == [3, 5] and each["column.bias"] == [3]
        assert each["row.weight"] == [5, 3] and each["row.bias"] == [5]


def on_one_rank(dst: int) -> bool:
    found = inn.full_state_dict(sharded(), group_dst=dst)
    return same(found, unsharded().state_dict()) if interlace.get_rank() == dst else not found


def test_the_whole_on_one_rank() -> None:
    assert interlace.run(on_one_rank, 3, 2) == [True] * 3


def loads(shape: tuple[int, ...]) -> str:
    layer = inn.ColumnParallelLinear(3, 8, bias=False)
    before = layer.weight.detach().clone()
    try:
        layer.load_state_dict({"weight": torch.zeros(shape)})
    except RuntimeError as error:
        assert torch.equal(layer.weight, before)
        return str(error)
    return "loaded"


def test_a_state_dict_of_another_shape_is_refused() -> None:
    assert interlace.run(loads, 2, (4, 3)) == interlace.run(loads, 2, (8, 3)) == ["loaded"] * 2
    for rank, text in enumerate(interlace.run(loads, 2, (5, 3))):
        assert (
            f"size mismatch for weight: got shape (5, 3); rank {rank} of 2 takes its part, (4, 3), or the "
            "whole, (8, 3)." in text
        )
        assert text.count("size mismatch") == 1


def missing() -> str:
    try:
        inn.RowParallelLinear(4, 2).load_state_dict({"weight": torch.zeros(2, 4)})
    except RuntimeError as error:
        return str(error)
    return "loaded"


def test_missing_keys_are_missing() -> None:
    assert 'Missing key(s) in state_dict: "bias"' in interlace.run(missing, 2)[0]


def on_meta() -> bool:
    with torch.device("meta"):
        model = nn.ModuleDict({name: make() for name, (make, _) in layers().items()})
    assert all(value.is_meta for value in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for layer in model.values():
        layer.reset_parameters()
    assert all(value.sharding.group is model["row"].group for value in model.parameters())
    return same(model.state_dict(), sharded().state_dict())


def test_made_without_memory_and_filled_later() -> None:
    assert interlace.run(on_meta, 3) == [True] * 3


def copies() -> bool:
    model = sharded()
    other = copy.deepcopy(model)
    with torch.no_grad():
        model["row"].weight.zero_()
    assert other["row"].weight.sharding.group is model["row"].group
    try:
        pickle.dumps(model)
    except TypeError as error:
        assert "save its state_dict()" in str(error)
    else:
        raise AssertionError("a group was pickled")
    return same(inn.full_state_dict(other), unsharded().state_dict())


def test_copies_share_the_group_and_pickles_are_refused() -> None:
    assert interlace.run(copies, 2) == [True] * 2


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: inn.ColumnParallelLinear(4, 6), "out_features must be a positive multiple of the"),
        (lambda: inn.RowParallelLinear(6, 4), "in_features must be a positive multiple of the"),
        (lambda: inn.SequenceParallelMLP(4, 6), "intermediate_size must be a positive multiple of"),
        (lambda: inn.SequenceParallelMLP(4, 8, "tanh"), "activation must be None or one of"),
        (lambda: inn.QKVParallelLinear(8, 6), "num_heads must be a positive multiple of the"),
        (lambda: inn.QKVParallelLinear(24, 12, 3), "num_kv_heads must be a multiple or a divisor"),
        (lambda: inn.QKVParallelLinear(8, 8, 3), "num_kv_heads must divide num_heads 8, got 3"),
        (lambda: inn.QKVParallelLinear(9, 8), "hidden_size 9 is not a multiple of num_heads 8"),
        (lambda: inn.VocabParallelEmbedding(4, 2, 4), "padding_idx must be within -4..3, got 4"),
        (lambda: inn.ColumnParallelLinear(4, 8.0), "out_features must be an int, got float"),
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
        (lambda: inn.SequenceParallelMLP(-32, 8), "hidden_size must be positive, got -32"),
        (lambda: inn.SequenceParallelMLP("32", 8), "hidden_size must be an int, got str"),
        (lambda: inn.ColumnParallelLinear(0, 8), "in_features must be positive, got 0"),
        (lambda: inn.QKVParallelLinear(8, 8, 0), "num_kv_heads must be positive, got 0"),
        (lambda: inn.VocabParallelEmbedding(4, 0), "embedding_dim must be positive, got 0"),
        (
            lambda: inn.SequenceParallelMLP(4, 8)(torch.ones(2 + interlace.get_rank(), 4)),
            "input must be equally long on all ranks along dimension 0, lengths by rank are [2, 3, 4, 5]",
        ),
        (
            lambda: functional.reduce_scatter(torch.ones(6, 4)),
            "dimension 0 of input has length 6, which the group's size 4 does not divide",
        ),
    ],
)
def test_sizes_that_do_not_fit(make: Callable[[], Any], text: str) -> None:
    error = failure(make, 4)
    assert isinstance(error, (ValueError, TypeError)) and text in str(error)


def forward_only() -> bool:
    """A model without gradients, both layouts."""
    torch.manual_seed(1)
    mlp = inn.SequenceParallelMLP(4, 12, batch_first=True, dtype=torch.float64)
    torch.manual_seed(1)
    up, down = nn.Linear(4, 12, dtype=torch.float64), nn.Linear(12, 4, dtype=torch.float64)
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    mine = x.chunk(interlace.get_world_size(), 1)[interlace.get_rank()]
    with torch.no_grad():
        found, whole = mlp(mine), down(nn.functional.gelu(up(x)))
    expected = whole.chunk(interlace.get_world_size(), 1)[interlace.get_rank()]
    return torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [2, 3])
def test_forward_in_a_simulation(world_size: int) -> None:
    assert interlace.run(forward_only, world_size) == [True] * world_size


def indices(what: str) -> str:
    layer = inn.VocabParallelEmbedding(5, 2)
    x = torch.zeros(4, dtype=torch.int64)
    if interlace.get_rank() == 1:
        x = {"range": x + 5, "dtype": x.float(), "length": x[:3]}[what]
    elif what == "length":
        x = x[:3]
    try:
        with torch.no_grad():
            layer(x)
    except (IndexError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_indices_that_do_not_fit() -> None:
    first, second = interlace.run(indices, 2, "range")
    assert second == "IndexError: input must be within 0..4, got 5..5 (on rank 1)"
    assert "input must be within 0..4, got 5..5" in first
    for text in interlace.run(indices, 2, "dtype"):
        assert "input must be an int32 or int64 tensor, got torch.float32" in text
    for text in interlace.run(indices, 2, "length"):
        assert "the group's size 2 must divide the length 3 of dim 0" in text


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda wrong: inn.ColumnParallelLinear(4, 5 if wrong else 4), "out_features .* got 5"),
        (lambda wrong: inn.RowParallelLinear(5 if wrong else 4, 4), "in_features .* got 5"),
        (lambda wrong: inn.SequenceParallelMLP(4, 5 if wrong else 4), "got 5"),
        (
            lambda wrong: inn.SequenceParallelMLP(4, 4, "tanh" if wrong else None),
            "activation .*tanh",
        ),
        (lambda wrong: inn.QKVParallelLinear(8, 4, 3 if wrong else 2), "num_kv_heads .* got 3"),
        (lambda wrong: inn.VocabParallelEmbedding(4, 2, 4 if wrong else 3), "padding_idx .* got 4"),
    ],
)
def test_what_one_rank_cannot_make_all_are_told(make: Callable[[bool], Any], text: str) -> None:
    """The others have made theirs, and hear of it when they first communicate."""

    def case() -> str:
        try:
            make(interlace.get_rank() == 1)
            interlace.barrier()
        except ValueError as error:
            return str(error)
        return "nothing"

    first, second = interlace.run(case, 2)
    assert re.search(text + r".* \(on rank 1\)", second)
    assert "rank 1 cannot take part: " in first and second.removesuffix(" (on rank 1)") in first


def no_tensor(kind: str) -> str:
    torch.manual_seed(1)
    make: dict[str, Callable[[], nn.Module]] = {
        "column": lambda: inn.ColumnParallelLinear(4, 4, batch_first=True),
        "row": lambda: inn.RowParallelLinear(8, 4),
        "mlp": lambda: inn.SequenceParallelMLP(4, 4),
        "heads": lambda: inn.QKVParallelLinear(4, 2, 1),
    }
    layer = make[kind]()
    try:
        with torch.no_grad():
            layer(None if interlace.get_rank() == 1 else torch.ones(2, 2, 4))
    except TypeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", ["column", "row", "mlp", "heads"])
def test_what_is_no_tensor_on_one_rank_all_are_told(kind: str) -> None:
    for text in interlace.run(no_tensor, 2, kind):
        assert "input must be a tensor, got NoneType" in text


def fails(kind: str) -> str:
    """What rank 1 makes of a layer that fails there alone, in its middle; then all can sum."""
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
    try:
        with torch.no_grad():
            run[kind]()
    except (ValueError, LookupError, RuntimeError) as error:
        total = torch.ones(1)
        interlace.all_reduce(total)
        return f"{error}, {total.item()}"
    return "nothing"


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
def test_what_fails_in_a_layer_on_one_rank_fails_on_all(kind: str, text: str) -> None:
    first, second = interlace.run(fails, 2, kind)
    assert f"rank 1 cannot take part: {text}" in first and first.endswith(", 2.0"), first
    assert text.partition(": ")[2] in second and second.endswith(", 2.0"), second


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
    """torch takes its first gradient undamped: no tensor that could be there before does that."""
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
    "bias of RowParallelLinear has other values": lambda: inn.RowParallelLinear(8, 2),
    "RowParallelLinear was initialised": lambda: inn.RowParallelLinear(8, 2, bias=False),
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

    for said in interlace.run(on_rank, 4, ""):
        assert said.startswith(text) and "on rank 1 of the group than on rank 0" in said
    told = (interlace.run(on_rank, 4, how) for how in ("in place", "by .data"))
    for said in itertools.chain(*told):
        assert said == "nothing" if "Attention" in text else said.startswith(text)


def uneven() -> str:
    layer = inn.RowParallelLinear(4, 2, bias=False)
    try:
        layer(torch.ones(3, 2))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_sequences_that_do_not_divide() -> None:
    for text in interlace.run(uneven, 2):
        assert "3" in text and "2" in text and text != "nothing"


@pytest.mark.parametrize("text", [text for text in LAYERS if "Embed" not in text])
def test_an_input_of_another_dtype_is_told_in_words_of_the_layer(text: str) -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        LAYERS[text]()(torch.ones(4, 1, 2, dtype=torch.bfloat16))

    (layer,) = re.findall("[A-Z][A-Za-z]+", text)
    found = str(failure(on_rank, 4))
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
def test_linear_layers_show_what_they_take_and_take_nothing_else(kind: Any, other: str) -> None:
    parameters = inspect.signature(kind).parameters
    shared = inspect.signature(LinearOptions).parameters
    assert all(parameters[name].default == each.default for name, each in shared.items())
    assert other not in parameters and "options" not in parameters

    def on_rank() -> None:
        sizes = (8, 4) if kind is inn.QKVParallelLinear else (4, 8)
        kind(*sizes, **{name: each.default for name, each in shared.items()})
        with pytest.raises(TypeError, match=rf"^{kind.__name__}\.__init__\(\) .*'{other}'$"):
            kind(*sizes, **{other: None})

    interlace.run(on_rank, 2)
