"""Contracts: what interlace needs of the internals of torch and Triton, asked of those that are installed.

When a release changes something, one test here says what. Each is about a file of ``runtime/compat``; what
is made of the internals has its own tests, which then fail too, and say less.
"""

import ast
import importlib
import inspect
import operator
import platform
import re
import sysconfig
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

import house
from interlace.runtime.compat import (
    releases,
    torch_groups,
    torch_modes,
    triton_launcher,
)
from interlace.runtime.compat.triton_interpreter import NO_POLICY, TensorHandle, builder
from stand_ins.replaced import Replacement, environment, replaced

TRITON = releases.release(releases.installed_release("Triton"))
POLICY = tuple(f"policy {number}" for number in range(len(NO_POLICY)))
CALLS: dict[str, tuple[Any, ...]] = {
    "create_load": ("pointers", *POLICY, "volatile"),
    "create_store": ("pointers", "value", *POLICY),
    "create_masked_load": ("pointers", "mask", "other", *POLICY, "volatile"),
    "create_masked_store": ("pointers", "value", "mask", *POLICY),
    "create_descriptor_load": ("descriptor", "indices", *POLICY),
    "create_atomic_rmw": ("op", "pointers", "value", "mask", "sem", "scope"),
    "create_atomic_cas": ("pointers", "compare", "value", "sem", "scope"),
    "create_barrier": (),
    "binary_op": ("left", "right", "op"),
    "unary_op": ("value", "op"),
    "create_dot": ("a", "b", "d", "precision", "imprecise"),
    "create_fma": ("x", "y", "z"),
    "create_clampf": ("x", "low", "high", "propagate"),
    "create_fp_to_fp": ("value", "type", "rounding"),
}
INTERNALS = (
    "triton.runtime",
    "triton._C",
    "triton.backends",
    "triton.compiler",
    "triton.knobs",
    "torch._C._distributed_c10d",
)


LIKELY = re.compile(r"^ *(from|import) (triton(\.(?!language)| import)|torch\._C)", re.MULTILINE)


def reached_into(text: str) -> list[str]:
    found: list[str] = []
    if not LIKELY.search(text):
        return found
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            found += [each for each in INTERNALS if f"{name}.".startswith(f"{each}.")]
    return found


def test_internals_are_imported_in_one_folder() -> None:
    found = {
        path: reached_into((house.ROOT / path).read_text()) for path in house.sources().values()
    }
    inside = {path for path in found if path.parts[:2] == ("runtime", "compat")}
    assert {path for path in found if found[path]} <= inside
    named = {each for path in inside for each in found[path]}
    assert named == set(INTERNALS), "what is not imported any more"
    assert reached_into("def f():\n    from triton import knobs") == ["triton.knobs"]
    assert not reached_into("import triton\nimport triton.language as tl")


# -- Triton's interpreter --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_the_builder_is_called_as_it_wants(name: str) -> None:
    inspect.signature(getattr(builder, name)).bind(*CALLS[name])


def test_overrides_exist_in_the_builder() -> None:
    from interlace.runtime.places.sim.interpreter.exact import exact_overrides

    made = {"get_bf16", "get_fp8e4nv", "get_fp8e5", "create_rsqrt"}  # older releases lack some
    assert all(hasattr(builder, name) for name in exact_overrides(builder).keys() - made)


def test_handles_and_tensors_have_the_fields_that_shortcuts_set() -> None:
    handle = TensorHandle(np.zeros(1, np.int32), tl.int32)
    assert vars(handle).keys() == {"data", "dtype", "attr"}
    assert vars(tl.tensor(handle, tl.int32)).keys() == {"handle", "shape", "numel", "type", "dtype"}


def test_dynamo_has_these_marks_of_functions() -> None:
    def ours() -> None: ...
    def torchs() -> None: ...

    torch_modes.assume_constant_result(ours)
    torch._dynamo.assume_constant_result(torchs)  # type: ignore[no-untyped-call]
    assert vars(ours) == vars(torchs) != {}
    torch_modes.disable(ours)
    disabled = torch._dynamo.disable(torchs)  # type: ignore[no-untyped-call]
    assert vars(ours).keys() <= vars(disabled).keys() and vars(disabled)["_torchdynamo_disable"]


def test_a_dispatch_mode_is_asked_whether_it_is_wrapped() -> None:
    assert TorchDispatchMode._should_skip_dynamo()
    assert not torch_modes.DispatchMode._should_skip_dynamo()


REACHED = {
    "triton.backends.nvidia.driver": ("annotate_arguments",) if TRITON >= (3, 7) else (),
    "triton.compiler.compiler": ("CompiledKernel._init_handles",),
    "triton.experimental.gluon._runtime": ("GluonASTSource",),
    "triton.knobs": ("runtime.launch_enter_hook", "runtime.launch_exit_hook"),
    "triton.runtime.cache": ("get_cache_manager",),
    "triton.runtime.jit": ("JITFunction.warmup",),
    "torch._C._dynamo.eval_frame": ("set_code_exec_strategy",),
    "torch._C._distributed_c10d": ("ProcessGroupGloo",),
}


@pytest.mark.parametrize("module", REACHED)
def test_what_is_reached_for_is_there(module: str) -> None:
    for name in REACHED[module]:
        operator.attrgetter(name)(importlib.import_module(module))


# -- Triton's compiler and launcher ----------------------------------------------------------------


def test_the_launcher_takes_the_arguments_that_the_direct_way_gives() -> None:
    text = inspect.getsource(triton_launcher._launcher_class())
    flat = "".join(text.split())
    after = "self.launch_cooperative_grid,self.launch_pdl,"
    hooks = "kernel_metadata,launch_metadata,launch_enter_hook,launch_exit_hook,"
    scratch = "global_scratch,profile_scratch,"
    if TRITON >= (3, 7):
        assert f"{after}{hooks}{scratch}self.arg_annotations,self.kernel_signature," in flat
    else:
        assert f"{after}{scratch}*args" in flat
    assert "self.profile_scratch_size" in flat


def test_scratch_memory_is_lent() -> None:
    allocation = triton_launcher._allocation
    lent = torch.zeros(1)
    with triton_launcher.scratch_from(lent):
        assert allocation._allocator.get()(4, 16, 0) is lent
    assert allocation._allocator.get() is not lent


# -- torch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", torch_groups.OLD_NAMES)
def test_a_collective_has_its_old_name(new: str) -> None:
    assert callable(getattr(torch_groups.ProcessGroup, torch_groups.OLD_NAMES[new]))


def test_groups_in_python_are_left_to_themselves_by_the_recorder() -> None:
    if not hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder"):
        return  # nothing is attached to anybody
    known = dist.distributed_c10d._FR_SELF_RECORDING_BACKENDS
    torch_groups.leave_unrecorded("somebody")
    assert "somebody" in known
    known.discard("somebody")


# -- warnings about other versions -----------------------------------------------------------------


def test_what_is_missing_is_named_with_the_releases_that_have_it() -> None:
    with (
        pytest.raises(ImportError, match=r"needs a part, of which Triton .*grid_of.*3\.6 to 3\.9"),
        releases.requiring("Triton", "a part"),
    ):
        builder.grid_of_nothing  # noqa: B018
    with releases.requiring("Triton", "a part"):
        builder.binary_op  # noqa: B018


def releases_of(**versions: str) -> Replacement:
    """Install these versions in a process that has not warned yet."""
    return releases, "installed_release", versions.__getitem__


FIRST: dict[str, str | None] = {releases.SAID: None, "RANK": None}


def test_newer_releases_are_named_once() -> None:
    newer = releases_of(Python="3.13.0", torch="2.16.0a0+git", Triton="3.10.1")
    with environment(**FIRST), replaced(newer):
        with pytest.warns(UserWarning, match=r"torch 2\.16.*Triton 3\.10\.1") as seen:
            releases.warn_of_untried()
            releases.warn_of_untried()
        assert not releases.was_tried("torch") and releases.was_tried("Python")
    assert len(seen) == 1 and "Python" not in str(seen[0].message)


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"Python": "3.10.1", "torch": "2.15.3+cpu", "Triton": "3.6.0"}, ""),
        *[
            (
                {"Python": "3.11.7", "torch": version, "Triton": "3.7.1"},
                f"torch {version} (tried: 2.11 to 2.15)",
            )
            for version in ("2.10.0", "3", "unknown")
        ],
    ],
)
def test_what_is_older_or_odd_is_named(versions: dict[str, str], said: str) -> None:
    with replaced(releases_of(**versions)):
        assert releases.untried_releases() == said


@pytest.mark.parametrize("locked", [None, 0, 1])
def test_a_python_without_a_lock_is_named(locked: int | None) -> None:
    """A free-threaded build has the same version number as the tested build."""
    build = (
        (releases, "installed_release", releases.installed_release.__wrapped__),
        (platform, "python_version", lambda: "3.14.2"),
        (sysconfig, "get_config_var", {"Py_GIL_DISABLED": locked}.get),
    )
    said = r"not tried with Python 3\.14\.2 free-threaded \(tried: 3\.10 to 3\.14, with a GIL\)"
    with environment(**FIRST), replaced(*build):
        if not locked:
            assert releases.untried_releases() == ""
            return
        with pytest.warns(UserWarning, match=said):
            releases.warn_of_untried()
