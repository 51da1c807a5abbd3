"""Real programs on interlace and on gloo: the same steps of training, their losses and their time.

    make clients                                  all of them, and the table of docs/reference/clients.md
    make clients CLIENTS="ray_train --ranks 4"    these; known results of the others stay

A client is a file of this folder. ``TRAINS`` describes it, ``TOLD`` shows how a user names the backend, and
``PACKAGES`` lists its packages. Every rank runs ``train(backend, step)`` in a new process; it calls
``step(loss)`` after every step. Losses are compared rank by rank and step by step. Between two ranks a sum
has one order, so all bits of the losses must be equal; between more ranks they may differ by ``BOUND``.
Times are medians of a step of rank 0 without the first steps: the lower one of rounds in turns (gloo,
interlace, gloo, interlace).
"""

import argparse
import ast
import importlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks/results/clients.json"
PAGE = ROOT / "docs/reference/clients.md"
BACKENDS = ("gloo", "interlace")
ROUNDS = 2
WARM_UP = 3  # steps
BOUND = 1e-5  # relative, for a loss in float32: a few roundings for every step
LIMIT_SECONDS = 300
MESSAGE_LENGTH = 3000
BEGIN, END = "<!-- clients: make clients -->", "<!-- end of clients -->"
HEAD = (
    "| program | trains | the backend is named by | works | losses | ms a step, gloo, interlace |"
)


def clients() -> list[str]:
    return sorted(file.stem for file in HERE.glob("*.py") if "\ndef train(" in file.read_text())


def said(name: str) -> dict[str, Any]:
    """Return the attributes of a client's file without an import of its library."""
    body = ast.parse((HERE / f"{name}.py").read_text()).body
    assigned = [(node.targets[0], node.value) for node in body if isinstance(node, ast.Assign)]
    return {
        to.id: ast.literal_eval(value)
        for to, value in assigned
        if isinstance(to, ast.Name) and to.id.isupper()
    }


class Steps:
    """Called by ``train`` after every step: keeps the loss, and the seconds since the last call."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def __call__(self, loss: Any) -> None:
        now = time.perf_counter()
        self.losses.append(float(loss.detach()))
        self.seconds.append(now - self._last)
        self._last = now


def run_rank(name: str, backend: str, results: str) -> None:
    """Run one rank of a client, numbered by the environment, and write its losses and seconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = Steps()
    importlib.import_module(f"clients.{name}").train(backend, steps)
    Path(results).write_text(json.dumps({"losses": steps.losses, "seconds": steps.seconds}))
    if dist.is_initialized():
        dist.destroy_process_group()


def run_backend(name: str, backend: str, ranks: int) -> list[dict[str, list[float]]]:
    """Return the losses and seconds of every rank of a client."""
    from support import free_port  # not in ranks: it imports interlace, which torch is to find

    job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "localhost"}
    job |= {"MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}
    job |= {"PYTHONPATH": HERE.parent}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            where = {
                key: str(value) for key, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items()
            }
            command = [sys.executable, "-m", "clients.run", "--rank", name, backend]
            with open(f"{folder}/{rank}.log", "w") as log:
                processes.append(
                    subprocess.Popen(
                        [*command, f"{folder}/{rank}.json"],
                        cwd=folder,
                        env={**os.environ, **where},
                        stdout=log,
                        stderr=log,
                    )
                )
        end = time.monotonic() + LIMIT_SECONDS
        try:
            codes = [each.wait(max(0.1, end - time.monotonic())) for each in processes]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for each in processes:
                each.kill()
                each.wait()
        if any(codes):
            logs = (Path(folder, f"{rank}.log").read_text() for rank in range(ranks))
            ended = f"ranks ended with {codes}"  # all there is to say of one that was killed
            raise RuntimeError("\n".join([ended, *(log[-MESSAGE_LENGTH:] for log in logs)]))
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def difference(ours: list[Any], theirs: list[Any]) -> float:
    """Return the largest relative difference of losses over ranks and steps; 0 if all bits are equal."""
    pairs = [
        pair
        for our, their in zip(ours, theirs, strict=True)
        for pair in zip(our["losses"], their["losses"], strict=True)
    ]
    assert pairs, "a client without a step"
    return max(0.0 if a == b else abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)


def run(name: str, ranks: int, rounds: int) -> dict[str, Any]:
    """A row of the table, as a dictionary."""
    client = said(name)
    versions = {each: importlib.metadata.version(each) for each in ("torch", *client["PACKAGES"])}
    row: dict[str, Any] = {
        "torch": versions.pop("torch"),
        "releases": versions,
        "trains": client["TRAINS"],
        "told": client["TOLD"],
        "ranks": ranks,
        "date": time.strftime("%Y-%m-%d"),
        "failed": {},
    }
    kept: dict[str, list[Any]] = {backend: [] for backend in BACKENDS}
    for _ in range(rounds):
        for backend in BACKENDS:
            try:
                kept[backend].append(run_backend(name, backend, ranks))
            except RuntimeError as error:
                row["failed"][backend] = str(error)
        if row["failed"]:
            return row
    row["difference"] = max(map(difference, kept["interlace"], kept["gloo"]))
    row["steps"] = len(kept["gloo"][0][0]["losses"])
    row["first"], row["last"] = (kept["gloo"][0][0]["losses"][at] for at in (0, -1))
    row["milliseconds"] = {
        backend: round(
            min(1e3 * statistics.median(each[0]["seconds"][WARM_UP:]) for each in kept[backend]), 2
        )
        for backend in BACKENDS
    }
    return row


def right(row: dict[str, Any]) -> bool:
    """Return whether losses are as equal as the client asks, and fall."""
    bound = 0.0 if row["ranks"] == 2 else BOUND
    return not row["failed"] and row["difference"] <= bound and row["last"] < row["first"]


def cells(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the cells of one client for its numbers of ranks; times are from the smallest number."""
    row = rows[min(rows)]
    releases = ", ".join(f"{name} {release}" for name, release in row["releases"].items())
    failed = "; ".join(
        f"{ranks} ranks on {backend}: {message}"
        for ranks, each in rows.items()
        for backend, message in each["failed"].items()
    )
    losses = ", ".join(
        f"{ranks} ranks: "
        + (f"within {each['difference']:.0e}" if each["difference"] else "equal bits")
        for ranks, each in rows.items()
        if not each["failed"]
    )
    times = row.get("milliseconds", {})
    works = "yes" if all(map(right, rows.values())) else f"no: {failed or 'losses differ'}"
    milliseconds = ", ".join(str(times[backend]) for backend in BACKENDS if backend in times)
    return [releases, row["trains"], row["told"], works, losses or "-", milliseconds or "-"]


def table(results: dict[str, Any]) -> str:
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    return "\n".join(
        [*lines, *("| " + " | ".join(cells(results[name])) + " |" for name in results)]
    )


def in_page(page: str, results: dict[str, Any]) -> str:
    """``page`` with the table of ``results``."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Real programs on interlace and on gloo.")
    parser.add_argument("clients", nargs="*", help="all by default")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args(arguments)
    failures = 0
    for name in chosen.clients or clients():
        row = run(name, chosen.ranks, chosen.rounds)
        failures += not right(row)
        for backend, message in row["failed"].items():
            print(f"{name} on {backend}:\n{message}")
            row["failed"][backend] = message.strip().splitlines()[-1]
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[name] = {**results.get(name, {}), str(chosen.ranks): row}
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        print(" | ".join([name, *cells({str(chosen.ranks): row})[3:]]), flush=True)
    PAGE.write_text(in_page(PAGE.read_text(), json.loads(RESULTS.read_text())))
    return failures


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
