"""The ops under torch's ``LocalTensorMode``, where one process holds the tensors of all ranks.

torch would run an unknown op once per rank, each alone, which silently gives a wrong result. So every op
has a rule here, which calls the reference of the op for all ranks of a group. A rule needs no live group.
It looks up a group's name in this order::

    a name passed to define()         the lists passed with it
    "ranks:0,2|1,3#tag"               these lists
    "0"                               all ranks, of torch's default group or of the mode
    a bound GroupSpec, a name of      the ranks of that group, and, for ranks outside of it, the groups that
    new_group, of a torch group       it gives when it is shifted, as torch assumes for LocalTensor, too
    any other                         all ranks of the mode, if there are as many as the group has

A plain tensor beside a LocalTensor is the same on all ranks. Results are complete at once. Rules are for
``LocalTensorMode`` itself, not for derived classes, as torch looks up exactly this class.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _local_tensor as simulation
from torch.utils._pytree import tree_leaves

from interlace.groups import groups, groups as rank_lists, specs
from interlace.ops import library
from interlace.ops.op.op import Op
from interlace.runtime.compat.torch_groups import resolve

NAMESPACE = "interlace"

_LocalTensor: Any = simulation.LocalTensor
_Mode: Any = simulation.LocalTensorMode
_Library: Any = torch.library.Library
_library = _Library(NAMESPACE, "FRAGMENT")
_defined: dict[str, list[list[int]]] = {}

RankLists = list[list[int]]


def register(ops: Mapping[str, Op], with_out: Sequence[str], in_place: Sequence[str]) -> None:
    _rule("group_size", _group_size)
    for name, op in ops.items():
        _rule(name, _simulation(op))
    for name in with_out:
        _rule(f"{name}_out", _simulation(ops[name], "out"))
    for name in in_place:
        _rule(f"{name}_", _simulation(ops[name], "input"))


def define(name: str, ranks: Sequence[Sequence[int]]) -> None:
    """Define a group's name (as in a ``GroupSpec``) for LocalTensorMode, as lists of ranks.

    >>> define("dp", [[0, 2], [1, 3]])
    """
    _defined[name] = [list(row) for row in ranks]


def _rule(name: str, rule: Callable[..., Any]) -> None:
    torch.library.register_torch_dispatch(f"{NAMESPACE}::{name}", _Mode, rule, lib=_library)


def _group_size(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if mode._disable:
        return func(*args, **(kwargs or {}))
    sizes = [len(row) for row in _known_groups(mode, args[0], None)]
    if min(sizes) != max(sizes):
        raise ValueError(f"group {args[0]!r} stands for groups of different sizes, {sizes}")
    return sizes[0]


def _simulation(op: Op, written: str = "") -> Callable[..., Any]:
    """Return a rule that computes for all ranks; ``written``: the argument to fill, "out" or "input"."""

    def rule(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if simulation._check_for_subclass(tree_leaves((args, named))):
            return NotImplemented  # the subclass must unwrap itself first
        ranks = _ranks_of(mode, func, (args, named))
        if ranks is None:
            return func(*args, **named)
        target = named["out"] if written == "out" else args[0]
        if written and not isinstance(target, _LocalTensor):
            raise TypeError(
                f"{written} must be a LocalTensor like the other tensors, got {type(target).__name__}"
            )
        with _outside():
            results = _compute(op, mode, args, ranks)
            if written:
                for rank, (output,) in results.items():
                    _write(written, target._local_tensors[rank], output, rank)
                return None if written == "out" else target
            columns = zip(*results.values(), strict=True)
            outputs = [_LocalTensor(dict(zip(results, column, strict=True))) for column in columns]
        several = isinstance(func._schema.returns[0].type, torch.ListType)
        return outputs if several else outputs[0]

    return rule


def _write(name: str, place: torch.Tensor, result: torch.Tensor, rank: int) -> None:
    if isinstance(place, _LocalTensor):
        raise TypeError(
            f"{name} is a LocalTensor of LocalTensors: make its parts outside of the mode, or with its "
            "rank_map"
        )
    if place.shape != result.shape or place.dtype != result.dtype:
        raise ValueError(
            f"{name} must be {tuple(result.shape)} of {result.dtype}, got {tuple(place.shape)} of "
            f"{place.dtype}, on rank {rank}"
        )
    place.copy_(result)


def _ranks_of(mode: Any, func: Any, args: Any) -> list[int] | None:
    """Return the ranks of the LocalTensors, or None if the mode is switched off."""
    held = [leaf._ranks for leaf in tree_leaves(args) if isinstance(leaf, _LocalTensor)]
    if not held:
        if mode._disable:
            return None
        raise TypeError(
            f"{func}: under LocalTensorMode an argument must be a LocalTensor, got plain tensors only"
        )
    if any(ranks != held[0] for ranks in held):
        raise ValueError(
            f"{func}: LocalTensors must have the same ranks, got {[sorted(r) for r in held]}"
        )
    return sorted(held[0])


@contextlib.contextmanager
def _outside() -> Any:
    """Return a context in which new tensors are plain tensors, whatever modes are nested."""
    with contextlib.ExitStack() as stack:
        for mode in reversed(simulation.get_local_tensor_mode_list()):
            stack.enter_context(mode.disable())
        yield


def _compute(op: Op, mode: Any, args: Any, ranks: list[int]) -> dict[int, list[torch.Tensor]]:
    *values, size, name = args
    outputs = {}
    for row in _rows(mode, name, int(size), ranks):
        record = [op.record([_on_rank(value, rank) for value in values]) for rank in row]
        for rank, results in zip(row, op.reference(record, len(row)), strict=True):
            outputs[rank] = results
    return {rank: outputs[rank] for rank in ranks}


def _on_rank(value: Any, rank: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [_on_rank(each, rank) for each in value]
    value = simulation._map_to_rank_local_val(value, rank)
    # LocalTensor({r: torch.ones(2) ...}) written inside the mode holds LocalTensors
    return _on_rank(value, rank) if isinstance(value, _LocalTensor) else value


def _rows(mode: Any, name: str, size: int, ranks: list[int]) -> RankLists:
    """Return the groups with simulated ranks among all groups that ``name`` stands for."""
    rows = _known_groups(mode, name, size)
    if any(len(row) != size for row in rows):
        raise ValueError(f"group {name!r} is {rows}, but the op was called for {size} ranks")
    held = set(ranks)
    chosen = [row for row in rows if held & set(row)]
    for row in chosen:
        if not held >= set(row):
            raise ValueError(
                f"group {name!r}: of {row} only {sorted(held & set(row))} are simulated"
            )
    members = sorted(rank for row in chosen for rank in row)
    if members != ranks:
        outside = sorted(held - set(members))
        raise ValueError(
            f"group {name!r}: rank {outside[0]} is not a member of any of {rows}"
            if outside
            else f"group {name!r}: a rank is in two of {rows}"
        )
    return chosen


def _known_groups(mode: Any, name: str, size: int | None) -> RankLists:
    """Return all groups that ``name`` stands for; ``size`` None means unknown."""
    everyone = sorted(mode.ranks)
    if name in _defined:
        return _defined[name]
    if name.startswith(specs.RANKS):
        return specs.rows_of(name)
    world = dist.get_world_size() if dist.is_initialized() else len(everyone)
    if name == rank_lists.DEFAULT_NAME:
        return [list(range(world)) if dist.is_initialized() else everyone]
    members = _alive(name)
    if members is not None:
        return _shift(name, members, max(world, everyone[-1] + 1))
    if size is not None and size != len(everyone):
        raise ValueError(
            f"group {name!r} has {size} ranks, but {len(everyone)} are simulated: pass the ranks of all "
            "groups, as [[0, 2], [1, 3]], or name them with interlace.ops.local_tensor.define"
        )
    return [everyone]


def _alive(name: str) -> Sequence[int] | None:
    """Return the ranks of the group with this name on the real rank of this process, or None."""
    whole = groups.joined_group()
    if whole is not None:
        found = specs._bound.get(whole, {}).get(name) or rank_lists.group_named(whole, name)
        if found is not None:
            return found.ranks
    if not dist.is_initialized():
        return None
    try:
        group = resolve(name)
    except (RuntimeError, LookupError, ValueError):
        return None
    return dist.get_process_group_ranks(group)


def _shift(name: str, members: Sequence[int], world: int) -> RankLists:
    """Return ``members`` and the same pattern shifted to every first rank that is left, as in a mesh."""
    pattern = [rank - members[0] for rank in members]
    if pattern != sorted(pattern):
        raise ValueError(f"group {name!r}: ranks must be in ascending order, got {list(members)}")
    left, rows = set(range(world)), []
    for first in range(world):
        row = [first + step for step in pattern]
        if first in left and left.issuperset(row):
            left.difference_update(row)
            rows.append(row)
    return rows if list(members) in rows else [list(members)]


register(library.BY_NAME, library.WITH_OUT, library.IN_PLACE)
