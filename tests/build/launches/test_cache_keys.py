"""Keys in Triton's cache are the same whatever a process has compiled before."""

import json
import subprocess
import sys

from tiers import thorough

PROGRAM = """
import importlib, json, os, pkgutil, sys
os.environ["TRITON_INTERPRET"] = "0"
import interlace.kernels
from interlace.runtime.compat import triton_launcher
from triton.language.core import constexpr
from triton.runtime.jit import DependenciesFinder, JITFunction

if sys.argv[2] == "theirs":
    DependenciesFinder._update_hash = triton_launcher._merge_known.__defaults__[0]

ours, package = {}, interlace.kernels
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    for name, value in vars(importlib.import_module(module.name)).items():
        if isinstance(value, JITFunction) and value.__module__ == module.name:
            ours[module.name + "." + name] = value
order = sorted(ours, reverse=sys.argv[1] == "backwards")
keys = {name: ours[name].cache_key for name in order}
several = []
for kernel, made in ours.items():
    constants = {}
    for (name, _), (value, _) in made.used_global_vals.items():
        if isinstance(value, constexpr):
            constants.setdefault(name, set()).add(repr(value.value))
    several += [f"{kernel}: {name}" for name, values in constants.items() if len(values) > 1]
print(json.dumps([keys, several]))
"""


def keys(order: str, whose: str) -> tuple[dict[str, str], list[str]]:
    """The keys of all functions, asked for in this order; and where a name has several values in one."""
    command = [sys.executable, "-c", PROGRAM, order, whose]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found, several = json.loads(done.stdout)
    return found, several


def test_keys_do_not_depend_on_what_was_asked_for_before() -> None:
    forwards, several = keys("forwards", "ours")
    assert len(forwards) > 100 and forwards == keys("backwards", "ours")[0]
    assert several == [], "Triton sorts constants of one name by the addresses of their modules"


@thorough
def test_control_keys_of_triton_alone_depend_on_it() -> None:
    assert keys("forwards", "theirs")[0] != keys("backwards", "theirs")[0]
