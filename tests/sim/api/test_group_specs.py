"""Groups as names: what describe() says of every form without a group, what bind() finds, GroupSpec."""

import dataclasses
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import functional
from interlace.groups.specs import bind, describe
from ranks import ranks


@pytest.mark.parametrize(
    "group, tag, expected",
    [
        ([0, 2], "", ("ranks:0,2", 2)),
        ((1, 0), "", ("ranks:1,0", 2)),
        ([[0, 2], [1, 3]], "", ("ranks:0,2|1,3", 2)),
        ([[0, 2], [1, 3]], "fast", ("ranks:0,2|1,3#fast", 2)),
        (interlace.GroupSpec("tp", 4), "", ("tp", 4)),
    ],
)
def test_names_need_no_group(group: Any, tag: str, expected: tuple[str, int]) -> None:
    assert not dist.is_initialized()
    assert describe(group, tag) == expected


@pytest.mark.parametrize(
    "group, tag, kind, message",
    [
        ([[0], [1, 2]], "", ValueError, r"all groups must have the same size, got sizes \[1, 2\]"),
        ([0, 0], "", ValueError, "distinct"),
        ([-1, 0], "", ValueError, "not negative"),
        ([0, True], "", TypeError, "ranks must be ints, got True"),
        ([0, "1"], "", TypeError, "ranks must be ints, got '1'"),
        ([[0, 1], 2], "", TypeError, "must be ranks or lists of ranks"),
        ([[]], "", TypeError, "must be ranks or lists of ranks"),
        ([0], "a#b", ValueError, "without '#'"),
        (interlace.GroupSpec("tp", 2), "fast", ValueError, "goes with a list of ranks"),
        (None, "", interlace.InterlaceError, "no group"),
        (3, "", TypeError, "got int"),
    ],
)
def test_what_is_no_group(group: Any, tag: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        describe(group, tag)


def test_specs_are_checked() -> None:
    for arguments in ((3, 2), ("", 2), ("tp", "2"), ("tp", True), ("tp", 2.0)):
        with pytest.raises(TypeError, match="GroupSpec"):
            interlace.GroupSpec(*arguments)  # type: ignore[arg-type]
    for arguments in (("tp", 0), ("tp", -1), ("ranks:0", 1)):
        with pytest.raises(ValueError, match="GroupSpec"):
            interlace.GroupSpec(*arguments)
    spec = interlace.GroupSpec("tp", 2)
    assert spec == pickle.loads(pickle.dumps(spec)) and hash(spec) == hash(
        dataclasses.replace(spec)
    )
    assert interlace.GroupSpec("tp") != spec and interlace.GroupSpec("tp").size is None


@ranks(4, place="sim")
def test_binding() -> None:
    rank = interlace.get_rank()
    pairs, columns = [[0.0, 1.0], [2.0, 3.0]][rank // 2], [[0.0, 2.0], [1.0, 3.0]][rank % 2]

    def gathered(group: Any) -> list[float]:
        found: list[float] = functional.all_gather(
            torch.tensor([float(rank)]), group=group
        ).tolist()
        return found

    spec = interlace.GroupSpec("bound here", 2)
    with pytest.raises(ValueError, match="no group named 'bound here'"):
        gathered(spec)
    with pytest.raises(ValueError, match="has size 2, the group has 4"):
        spec.bind(None)
    spec.bind([[0, 1], [2, 3]])
    assert gathered(spec) == pairs
    spec.bind([[0, 2], [1, 3]])  # again, to another group
    for form in (spec, "bound here", interlace.GroupSpec("bound here")):
        assert gathered(form) == columns
    with pytest.raises(ValueError, match="has 2 ranks, but the op was traced for 3"):
        gathered(interlace.GroupSpec("bound here", 3))
    interlace.new_group([0, 1, 2, 3], name="named")
    assert gathered(interlace.GroupSpec("named", 4)) == [0.0, 1.0, 2.0, 3.0]


def test_a_name_stands_for_one_group_in_its_run_only() -> None:
    spec = interlace.GroupSpec("of one run", 2)

    def body(binding: bool) -> str:
        if binding:
            spec.bind(None)
        try:
            functional.all_reduce(torch.ones(1), group=spec)
        except ValueError as error:
            return str(error)[:24]
        return "found"

    assert interlace.run(body, 2, True) == ["found", "found"]
    assert interlace.run(body, 2, False) == ["group: there is no group"] * 2


@ranks(2, place="sim")
def test_communicators_have_names_that_find_them() -> None:
    groups = [interlace.new_group([1, 0]) for _ in range(3)]
    groups.append(interlace.new_group([0, 1], name="mine"))
    names = [describe(group)[0] for group in groups]
    assert all(bind(name, 2) is group for name, group in zip(names, groups, strict=True))
    assert len(set(names)) == 4 and names[3] == "mine"
