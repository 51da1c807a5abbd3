"""``interlace doctor``: what this machine offers, which places work here, and why others do not.

A place that the facts allow is tried with two ranks and one op. Other releases of torch or Triton may have
other internals than interlace expects, and no fact shows that.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

import torch

import interlace
from interlace.arguments.words import RunPlace
from interlace.launcher import PLACES
from interlace.output.consoles import write
from interlace.output.machine import DEVICE_LIBRARY, MachineFacts, inspect_machine
from interlace.output.options import CommandOptions, option

OLDEST_CAPABILITY = (8, 0)
TRY_SECONDS = 60.0  # a place that takes longer for one op does not work
SUM = 48.0  # the right result of _one_op


@dataclass(frozen=True)
class DoctorOptions(CommandOptions):
    """Show what this machine offers and which places work."""

    statuses = ((1, "no place works"),)

    json: bool = option(False, action="store_true", help="print JSON")


def collect() -> MachineFacts:
    """Return facts about this machine, and under "places" what they mean for each place."""
    facts = inspect_machine()
    facts["places"] = judge_places(facts)
    return facts


def judge_places(facts: MachineFacts) -> MachineFacts:
    """Return for each place whether it works with these facts: {"works": bool, "why": str}."""
    host, gpus, interpreted = facts["host"], facts["gpus"], facts["triton"]["interpreted"]
    compiler = "kernels are loaded for the compiler: set TRITON_INTERPRET=1 before Python starts"
    places: MachineFacts = {}

    def place(name: str, missing: list[str], note: str) -> None:
        places[name] = {"works": not missing, "why": "; ".join(missing) or note}

    missing = [] if interpreted else [compiler]
    if not facts["greenlet"]:
        missing.append("greenlet is not installed")
    place("sim", missing, "ranks are simulated in this process")

    missing = [
        f"{subject}: {_reason(host[fact])}"
        for fact, subject in (
            ("sealed_memfd", "no sealed memfd"),
            ("pidfd_open", "no pidfd"),
            ("pass_descriptors", "descriptors cannot be passed"),
        )
        if host[fact] is not True
    ]
    note = (
        "plain collectives and Triton kernels" if interpreted else f"collectives only; {compiler}"
    )
    place("shm", missing, note)

    if facts["hosts"]["gloo"] is not True:
        missing.append(f"torch has no gloo: {_reason(facts['hosts']['gloo'])}")
    note = "plain collectives between hosts, by TCP; other ops use them"
    place("hosts", missing, note)

    missing = []
    if not isinstance(gpus, list):
        missing.append(f"CUDA fails: {_reason(gpus)}")
    elif not gpus:
        missing.append("torch sees no CUDA device")
    else:
        old = [g["name"] for g in gpus if tuple(g["capability"]) < OLDEST_CAPABILITY]
        if old:
            missing.append(f"{old[0]} is older than compute capability 8.0")
        if interpreted:
            missing.append("kernels are loaded for the interpreter: unset TRITON_INTERPRET")
    alone = isinstance(gpus, list) and len(gpus) == 1
    note = "one GPU: virtual ranks only" if alone else f"peer access: {facts['peer_access']}"
    place("cuda", missing, note)

    backend, library = facts["nvshmem"]["torch_backend"], facts["nvshmem"]["device_library"]
    if backend is not True:
        reason = "" if backend is False else f": {_reason(backend)}"
        missing.append(f"torch has no NVSHMEM backend{reason}")
    if not isinstance(library, str):
        missing.append(f"{DEVICE_LIBRARY} not found; install interlace[cuda12] or [cuda13]")
    place("nvshmem", missing, "torch's NVSHMEM backend and its device library are there")
    return places


def try_places(facts: MachineFacts) -> None:
    """Try the places that work according to ``facts`` and need no torchrun; add the results to them."""
    for name, verdict in facts["places"].items():
        if verdict["works"]:
            if name in PLACES:
                verdict["works"], message = _try(name, facts["triton"]["interpreted"])
            else:
                message = "not tried, because it needs torchrun"
            verdict["why"] = f"{message}; {verdict['why']}"


def _try(place: RunPlace, interpreted: bool) -> tuple[bool, str]:
    kernels = interpreted or place == "cuda"
    begin = time.monotonic()
    try:
        results = interlace.run(_one_op, 2, kernels, place=place, timeout=TRY_SECONDS)
    except Exception as error:  # any exception of another release is a result
        first = str(error).strip().partition("\n")[0]
        return False, f"tried, and failed with {type(error).__name__}: {first}"
    seconds = time.monotonic() - begin
    if results != [SUM, SUM]:
        return False, f"tried, and got {results}, which is wrong: {[SUM, SUM]} is right"
    op = "all_gather_matmul" if kernels else "all_reduce"
    return True, f"tried: {op} on 2 ranks was right after {seconds:.1f} s"


def _one_op(kernels: bool) -> float:
    """Return SUM, computed by a fused kernel or by a collective without a kernel."""
    part = torch.full((2, 4), 1.0 + interlace.get_rank(), device=interlace.device())
    if kernels:
        weight = torch.ones(4, 2, device=part.device)
        return float(interlace.all_gather_matmul(part, weight, algorithm="fused").sum())
    interlace.all_reduce(part)
    return float(part.sum() * 2)


def doctor(console: Any, options: DoctorOptions) -> int:
    """Print the facts and the results of trials; return 0 if at least one place works, otherwise 1."""
    facts = collect()
    try_places(facts)
    code = 0 if any(place["works"] for place in facts["places"].values()) else 1
    if options.json:
        console.out(json.dumps(facts, indent=2))
        return code
    for name, value in _rows(facts):
        write(console, f"{name:22} {value}")
    for name, verdict in facts["places"].items():
        works, style = ("yes", "green") if verdict["works"] else ("no", "red")
        text = f"{f'place {name}':22} {works}: {verdict['why']}"
        write(console, text, style)
    return code


def _rows(facts: MachineFacts) -> list[tuple[str, str]]:
    versions, triton, host, nvshmem = (facts[k] for k in ("torch", "triton", "host", "nvshmem"))
    hosts = facts["hosts"]
    mode = "interpreted" if triton["interpreted"] else "compiled"
    built_for = f"{versions.get('version')}, CUDA build: {versions.get('cuda_build') or 'none'}"
    rows = [
        ("python", facts["python"]),
        ("interlace", _show(facts["interlace"])),
        ("torch", _show(versions) if "error" in versions else built_for),
        ("triton", f"{_show(triton['version'])}, kernels are {mode}"),
        ("releases not tried", facts["untried"] or "none"),
        ("numpy", _show(facts["numpy"])),
        ("greenlet", _show(facts["greenlet"])),
        ("cupy", _show(facts["cupy"])),
    ]
    if isinstance(facts["gpus"], list):
        for gpu in facts["gpus"]:
            capability = ".".join(map(str, gpu["capability"]))
            memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
            rows.append((f"GPU {gpu['index']}", f"{gpu['name']}, sm {capability}, {memory}"))
    if not facts["gpus"] or not isinstance(facts["gpus"], list):
        rows.append(("GPUs", _show(facts["gpus"] or None)))
    memory = host["memory_bytes"]
    return [
        *rows,
        ("peer access", _show(facts["peer_access"])),
        ("multicast", _show(facts["multicast"])),
        ("NVSHMEM in torch", _show(nvshmem["torch_backend"])),
        ("NVSHMEM device library", _show(nvshmem["device_library"])),
        ("NVSHMEM host library", _show(nvshmem["host_library"])),
        ("system", host["system"]),
        ("cores", _show(host["cores"])),
        ("memory", f"{memory / 2**30:.1f} GiB" if isinstance(memory, int) else _show(memory)),
        ("sealed memfd", _show(host["sealed_memfd"])),
        ("pidfd_open", _show(host["pidfd_open"])),
        ("passing descriptors", _show(host["pass_descriptors"])),
        ("machine code for it", _show(host["machine_code"])),
        ("/proc/self/fd", _show(host["proc_self_fd"])),
        ("this host", f"{_show(hosts['this_host'])}, the same for ranks that share it"),
        ("ranks on it", _show(hosts["launched"] or "not started by a launcher")),
        ("gloo between hosts", _show(hosts["gloo"])),
        ("NCCL in torch", _show(hosts["nccl"])),
    ]


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return f"fails: {_reason(value)}"
    return {None: "none", True: "yes", False: "no"}.get(value, str(value))


def _reason(value: Any) -> str:
    return str(value["error"]) if isinstance(value, dict) else "not on this system"
