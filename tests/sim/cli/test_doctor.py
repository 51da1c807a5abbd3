"""The doctor never crashes, its facts are JSON, and its verdicts follow from the facts."""

import copy
import importlib.metadata
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

import interlace
from interlace.cli.commands.doctor import (
    SUM,
    DoctorOptions,
    collect,
    doctor,
    judge_places,
    try_places,
)
from interlace.output import machine

RUN = interlace.run
PLACES = {"sim", "shm", "hosts", "cuda", "nvshmem"}
GPU = {"index": 0, "name": "H200", "capability": [9, 0], "memory_bytes": 139 << 30}
CLUSTER: dict[str, Any] = {
    "triton": {"version": "3.7.1", "interpreted": False},
    "greenlet": "3.1",
    "gpus": [GPU, {**GPU, "index": 1}],
    "peer_access": "all 2 pairs",
    "nvshmem": {"torch_backend": True, "device_library": "/lib/libnvshmem_device.bc"},
    "host": {"sealed_memfd": True, "pidfd_open": True, "pass_descriptors": True},
    "hosts": {"this_host": "node1 (a)", "launched": None, "gloo": True, "nccl": True},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return CLUSTER with one fact, named by a dotted path, replaced."""
    facts = copy.deepcopy(CLUSTER)
    *outer, last = path.split(".")
    target = facts
    for key in outer:
        target = target[key]
    target[last] = value
    return facts


@pytest.fixture(autouse=True)
def tried() -> Iterator[mock.Mock]:
    """Stands for a successful run on two ranks of a place; the tests of pages run it."""
    with mock.patch.object(interlace, "run", return_value=[SUM, SUM]) as run:
        yield run


def printed(as_json: bool) -> tuple[int, str]:
    stream = io.StringIO()
    code = doctor(Console(file=stream, width=100), DoctorOptions(as_json))
    return code, stream.getvalue()


def test_pages_have_the_facts_and_every_place() -> None:
    facts = collect()
    assert set(facts["places"]) == PLACES
    assert all(verdict["why"] for verdict in facts["places"].values())
    code, text = printed(as_json=True)
    assert code == 0 and json.loads(text)["python"] == json.loads(json.dumps(facts))["python"]
    code, text = printed(as_json=False)
    assert code == 0
    assert all(word in text for word in ("python", "torch", "triton", "sealed memfd", *PLACES))


def test_everything_works_on_a_cluster() -> None:
    places = judge_places(CLUSTER)
    assert {name for name, verdict in places.items() if verdict["works"]} == PLACES - {"sim"}
    assert "TRITON_INTERPRET=1" in places["sim"]["why"]


@pytest.mark.parametrize(
    ("path", "value", "place", "why"),
    [
        ("greenlet", None, "sim", "greenlet is not installed"),
        ("host.sealed_memfd", {"error": "OSError: no"}, "shm", "no sealed memfd: OSError: no"),
        ("host.pidfd_open", False, "shm", "no pidfd: not on this system"),
        ("host.sealed_memfd", {"error": "OSError: no"}, "hosts", "no sealed memfd: OSError: no"),
        ("hosts.gloo", False, "hosts", "torch has no gloo: not on this system"),
        ("gpus", [], "cuda", "torch sees no CUDA device"),
        ("gpus", {"error": "RuntimeError: driver"}, "cuda", "CUDA fails: RuntimeError: driver"),
        ("gpus", [{**GPU, "name": "V100", "capability": [7, 0]}], "cuda", "V100 is older"),
        ("triton.interpreted", True, "cuda", "unset TRITON_INTERPRET"),
        ("nvshmem.torch_backend", False, "nvshmem", "torch has no NVSHMEM backend"),
        ("nvshmem.device_library", None, "nvshmem", "libnvshmem_device.bc not found"),
        ("gpus", [], "nvshmem", "torch sees no CUDA device"),
    ],
)
def test_a_missing_thing_is_named(path: str, value: Any, place: str, why: str) -> None:
    verdict = judge_places(changed(path, value))[place]
    assert not verdict["works"]
    assert why in verdict["why"]


def test_one_gpu_has_virtual_ranks() -> None:
    verdict = judge_places(changed("gpus", [GPU]))["cuda"]
    assert verdict == {"works": True, "why": "one GPU: virtual ranks only"}


def test_it_says_which_ranks_are_on_this_host() -> None:
    from interlace.runtime.places.hosts import host_map

    before = collect()["hosts"]
    assert before["launched"] is None and "not started by a launcher" in printed(as_json=False)[1]
    ranks = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    with mock.patch.dict(os.environ, ranks):
        assert "4 of 8 ranks, this is rank 5" in printed(as_json=False)[1]
    with mock.patch.dict(os.environ, {**ranks, "RANK": "8"}):
        text = printed(as_json=False)[1]
    assert "RANK='8' in the environment must be less than WORLD_SIZE='8'" in text
    with mock.patch.object(host_map, "this_host", return_value="another kernel"):
        assert collect()["hosts"]["this_host"] != before["this_host"]


def test_survives_when_everything_is_broken() -> None:
    broken = mock.Mock(side_effect=RuntimeError("broken on purpose"))
    names = ["_torch", "_gpus", "_peer_access", "_multicast", "_memory", "_sealed_memfd"]
    names += ["_pidfd_open", "_pass_descriptors", "_nvshmem_backend", "_nvshmem_library"]
    absent = importlib.metadata.PackageNotFoundError("of any name")
    with (
        mock.patch.multiple(machine, _is_interpreted=lambda: False, **dict.fromkeys(names, broken)),
        mock.patch.object(importlib.metadata, "version", side_effect=absent),
    ):
        code, text = printed(as_json=False)
    assert code == 1
    assert "broken on purpose" in text


def test_optional_packages_are_not_imported() -> None:
    """An import of a broken cupy would end the doctor, so it reads the version only."""
    optional = {"cupy", "nvshmem", "matplotlib"}
    before = optional & set(sys.modules)  # other tests may draw
    collect()
    assert optional & set(sys.modules) == before


def test_a_place_that_the_facts_allow_is_tried(tried: mock.Mock) -> None:
    facts = {**CLUSTER, "places": judge_places(CLUSTER)}
    try_places(facts)
    assert [call.kwargs["place"] for call in tried.mock_calls] == ["shm", "cuda"]
    assert facts["places"]["shm"]["why"].startswith("tried: all_reduce on 2 ranks was right after")
    assert facts["places"]["hosts"]["why"].startswith("not tried, because it needs torchrun; ")
    assert not facts["places"]["sim"]["works"]


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (AttributeError("no 'load'\nand more"), "failed with AttributeError: no 'load';"),
        ([[SUM, 0.0]] * 2, r"got \[48\.0, 0\.0\], which is wrong"),
    ],
)
def test_a_place_that_fails_does_not_work(tried: mock.Mock, result: Any, why: str) -> None:
    tried.side_effect = result
    facts = {**CLUSTER, "places": judge_places(CLUSTER)}
    try_places(facts)
    assert not facts["places"]["cuda"]["works"]
    assert re.search(why, facts["places"]["cuda"]["why"])


def test_two_ranks_of_a_place_do_the_op(tried: mock.Mock) -> None:
    tried.side_effect = RUN
    places = {"sim": {"works": True, "why": ""}}
    try_places({"triton": {"interpreted": True}, "places": places})
    assert places["sim"]["works"] and places["sim"]["why"].startswith("tried: ")
