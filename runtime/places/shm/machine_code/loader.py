"""Machine code for this processor, made of LLVM IR by llvmlite: no compiler and no assembler is needed.

llvmlite is imported when code is wanted, not before: that takes as long as making the code does. There is
none on processors of which nobody has written down what they need (``base_ir.PROCESSORS``), without
llvmlite, and where a hardened kernel refuses to execute fresh memory.
"""

import functools
import itertools
import os
import platform
import sys
import threading
from typing import Any

from interlace.runtime.places.shm.machine_code.base_ir import PROCESSORS

VARIABLE = "INTERLACE_MACHINE_CODE"
"""Set to 0, no machine code is made, and Python and torch do it all."""

OLDEST = (20,)
"""LLVM's release: it knows pointers without types, splats, and intrinsics that nobody has declared."""

PROCESSOR = platform.machine()

_kept: list[Any] = []  # code is loaded as long as these live
_numbers = itertools.count()
_one_at_a_time = threading.Lock()


@functools.cache
def supported() -> bool:
    """Whether code for this processor can be made, as far as is known before trying."""
    if os.environ.get(VARIABLE) == "0" or sys.platform != "linux" or PROCESSOR not in PROCESSORS:
        return False
    try:
        from llvmlite import binding

        binding.check_jit_execution()
    except (ImportError, OSError):
        return False
    if binding.llvm_version_info < OLDEST:
        return False  # whoever pins an older llvmlite has ops in Python, not errors
    # without F16C, numbers of 16 bits would be converted by a library that need not be there
    return PROCESSOR != "x86_64" or bool(binding.get_host_cpu_features().get("f16c"))


@functools.cache
def _jit() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        codemodel="jitdefault",
        jit=True,
    )
    return binding.create_lljit_compiler(machine)


def compiled(ir: str, name: str) -> int:
    """The address of function ``name`` of LLVM IR, which stays loaded; RuntimeError if LLVM refuses."""
    from llvmlite import binding

    module = binding.JITLibraryBuilder().add_ir(ir).export_symbol(name).add_current_process()
    with _one_at_a_time:
        library = module.link(_jit(), f"{name} {next(_numbers)}")
        _kept.append(library)
    address: int = library[name]
    return address
