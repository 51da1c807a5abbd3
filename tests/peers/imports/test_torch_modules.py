"""With ``--shims torch`` every module of torch imports, classes stay classes, and ops stay ops."""

import json
import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.symmetric_memory.functions import NAMES
from interlace_verify import shims
from interlace_verify.shims import torch_cuda, torch_distributed
from interlace_verify.suite.jobs import load_function

FILE = pathlib.Path(__file__).with_name("torch_names.py")

WALK = r"""
import contextlib, importlib, json, os, pkgutil, sys, warnings

import interlace, torch
from interlace_verify import shims
from interlace_verify.shims import torch_cuda, torch_distributed

def below(package):
    yield package
    folder = os.path.join(os.path.dirname(torch.__file__), *package.split(".")[1:])
    for module in pkgutil.iter_modules([folder]):
        name = f"{package}.{module.name}"
        if module.ispkg:
            yield from below(name)
        elif module.name != "__main__":
            yield name

names = [name for each in json.loads(sys.argv[1]) for name in below(each)]

def refused(names):
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            yield name, repr(error)

warnings.simplefilter("ignore")
with shims.installed("torch"), contextlib.redirect_stdout(sys.stderr):
    within = dict(refused(names))
    replaced = {**torch_cuda.REPLACED, **torch_distributed.REPLACED,
                "Group": torch_distributed.SimulatedGroup, "Memory": torch_distributed.MemoryOfTorch}
outside = dict(refused(within))
kinds = [each for each in replaced.values() if getattr(each, "__module__", "").startswith("interlace")]
kept = [f"{name}.{key}" for name, module in list(sys.modules.items()) if name.startswith("torch")
        for key, value in list(vars(module).items()) if any(value is each for each in kinds)]
print(json.dumps([len(names), {name: within[name] for name in within if name not in outside}, kept]))
"""


def walk(*packages: str) -> tuple[int, dict[str, str], list[str]]:
    """How many modules ``packages`` have; which import without the shim only, and what they kept of it."""
    argv = [sys.executable, "-W", "ignore", "-c", WALK, json.dumps(packages)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def test_every_module_imports() -> None:
    packages = ("torch.distributed", "torch._inductor", "torch.cuda", "torch.nn", "torch.optim")
    count, refused, kept = walk(*packages)
    assert count > 700 and not refused and not kept


@pytest.mark.parametrize(
    ("module", "replaced"),
    [(torch.cuda, torch_cuda.REPLACED), (dist.distributed_c10d, torch_distributed.REPLACED)],
)
def test_a_class_stands_for_a_class(module: types.ModuleType, replaced: dict[str, Any]) -> None:
    for name, value in replaced.items():
        assert isinstance(value, type) == isinstance(getattr(module, name), type), name


def test_annotations_subclasses_and_the_type_of_a_group() -> None:
    with shims.installed("torch"):
        assert interlace.run(load_function(f"{FILE}::kinds"), 2) == [0, 1]
        assert issubclass(dist.ProcessGroup, torch_distributed._REAL)
    assert dist.ProcessGroup is torch_distributed._REAL


def test_ops_stay_ops_and_run_here() -> None:
    with shims.installed("torch"):
        fn = load_function(f"{FILE}::sums")
        # by names that the file took when it was imported, and by those of the namespace
        assert interlace.run(fn, 2) == [[[3.0] * 4] * 4] * 2
        assert {type(getattr(torch.ops.symm_mem, name)) for name in NAMES} != {
            torch._ops.OpOverloadPacket
        }
    assert {type(getattr(torch.ops.symm_mem, name)) for name in NAMES} == {
        torch._ops.OpOverloadPacket
    }
    assert type(torch.ops.symm_mem.one_shot_all_reduce.default) is torch._ops.OpOverload
