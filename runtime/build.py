"""Compile catalogue entries for an architecture, without a GPU, and measure what came out.

In a process that interprets kernels, ``@triton.jit`` has already made interpreted functions of them.
So worker processes do the compiling, each without ``TRITON_INTERPRET``: this module is what they run
(``python -m interlace.runtime.build``), one JSON line per entry in, one per :class:`Report` out. A
compiler that crashes takes its worker along; the entry is reported and the next worker goes on.
Triton's cache makes the second build of an unchanged kernel a matter of milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from interlace.runtime import machine_code
from interlace.runtime.catalogue import Entry

# On these no default may spill; older chips have no tensor memory, TMA or wgmma to save registers.
STRICT_ARCHES = (90, 100)


@dataclass(frozen=True)
class Report:
    """What one entry compiled to. ``tensor_cores`` is None where the kernel has no use for them.

    ``shared`` and ``stack`` are bytes, per program and per thread; ``spills`` counts instructions.
    ``faults`` are broken ordering rules; ``error`` is set, and nothing else, if it did not compile.
    """

    name: str
    arch: int
    default: bool
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0
    tensor_cores: int | None = None
    faults: list[str] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0

    def problems(self) -> list[str]:
        """Why this fails a build; empty if it does not."""
        if self.error is not None:
            return [f"does not compile: {self.error}"]
        found = list(self.faults)
        if self.default and self.arch in STRICT_ARCHES and (self.stack or self.spills):
            found.append(f"{self.stack} bytes of stack, {self.spills} spill instructions")
        if self.tensor_cores == 0:
            found.append("no tensor-core instructions")
        return found


def build(
    entries: Sequence[Entry],
    *,
    workers: int | None = None,
    on_report: Callable[[Report], None] = lambda report: None,
) -> list[Report]:
    """Compile and measure ``entries`` in worker processes; reports in the same order.

    ``workers`` is one per core by default. ``on_report`` is called as each entry is done.
    """
    reports: dict[int, Report] = {}
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(entries)):
        todo.put(index)
    lock = threading.Lock()

    def work() -> None:
        worker: _Worker | None = None
        try:
            while True:
                index = todo.get_nowait()
                worker = worker or _Worker()
                report = worker.compile(entries[index])
                if report is None:
                    report = _failed(entries[index], worker.last_words())
                    worker = None
                with lock:
                    reports[index] = report
                    on_report(report)
        except queue.Empty:
            pass
        finally:
            if worker:
                worker.close()

    count = min(len(entries), workers or os.cpu_count() or 1)
    threads = [threading.Thread(target=work, name=f"build {i}") for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [reports[index] for index in range(len(entries))]


def _failed(entry: Entry, error: str) -> Report:
    return Report(entry.name, entry.arch, entry.default, error=error)


class _Worker:
    """One compiling process."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # outlives this function
        self._process = subprocess.Popen(
            [sys.executable, "-m", "interlace.runtime.build"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": paths},
        )

    def compile(self, entry: Entry) -> Report | None:
        """The report, or None if the process has ended instead."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(asdict(entry)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._process.stdout.readline()
        return Report(**json.loads(line)) if line else None

    def last_words(self) -> str:
        """How the process ended, with the end of what it wrote."""
        self.close()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        self._errors.close()
        return f"the compiler ended with code {self._process.returncode}: {' '.join(said[-3:])}"

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


# -- in the worker -----------------------------------------------------------------------------


def compile_entry(entry: Entry) -> Any:
    """Triton's compiled kernel of ``entry``. Only where ``@triton.jit`` compiles."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(entry.module), entry.kernel)
    names = list(kernel.arg_names)
    given = sorted({*entry.types, *entry.constants})
    if given != sorted(names):
        differing = sorted(set(given) ^ set(names))
        raise TypeError(f"the catalogue and {entry.kernel} differ in arguments {differing}")
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in entry.constants else entry.types[n] for n in names},
        constexprs=dict(entry.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in entry.divisible},
    )
    options = {"num_warps": entry.num_warps, "num_stages": entry.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", entry.arch, 32), options=options)


def measure(entry: Entry) -> Report:
    """Compile ``entry`` and look at its PTX and SASS."""
    begin = time.monotonic()
    compiled = compile_entry(entry)
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        sass = _tool("nvdisasm", file.name)
    counts = machine_code.instruction_counts(sass)
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    faults = [
        *machine_code.unordered_releases(ptx),
        *machine_code.published_bulk_stores(ptx),
        *machine_code.weak_polls(ptx),
    ]
    if entry.kernel == "all_gather_matmul_kernel":
        faults += [*machine_code.unfenced_bulk_loads(ptx), *machine_code.early_loads(ptx)]
    return Report(
        entry.name,
        entry.arch,
        entry.default,
        registers=used["REG"],
        stack=used["STACK"],
        spills=machine_code.spills(counts),
        shared=int(compiled.metadata.shared),
        tensor_cores=machine_code.tensor_core_instructions(counts, entry.arch)
        if entry.wants_tensor_cores
        else None,
        faults=faults,
        seconds=time.monotonic() - begin,
    )


def _tool(name: str, *arguments: str) -> str:
    """Output of a CUDA binary utility that ships inside Triton."""
    import triton

    command = [getattr(triton.knobs.nvidia, name).path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _describe(error: Exception) -> str:
    """One line for a compiler's error, which may be thousands long."""
    causes, cause = [], error
    while cause is not None:
        last = [line.strip() for line in str(cause).splitlines() if line.strip()]
        causes.append(f"{type(cause).__name__}: {last[-1] if last else ''}")
        cause = cause.__cause__  # type: ignore[assignment]
    return "; ".join(causes)[:1000]


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer entries with reports, line by line, until there are no more."""
    for line in requests:
        fields = json.loads(line)
        entry = Entry(**{**fields, "divisible": tuple(fields["divisible"])})
        try:
            report = measure(entry)
        except Exception as error:
            report = _failed(entry, _describe(error))
        answers.write(json.dumps(asdict(report)) + "\n")
        answers.flush()


if __name__ == "__main__":
    # Whatever the compiler prints must not get between the answers.
    answers_fd = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answers_fd, "w") as out:
        serve(sys.stdin, out)
