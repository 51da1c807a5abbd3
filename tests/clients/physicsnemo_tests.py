"""PhysicsNeMo's own tests of its distributed autograd, on gloo and on interlace, with 2 ranks and with 4.

    make clients PHYSICSNEMO=folder     its repository at the installed release

Its wheel has no tests. The tests of ``FILE`` gather, scatter and exchange shards of unequal lengths. They
ask for a GPU per rank. Here they run without the fixture that skips them on a CPU, and "cuda:0" in their
text is "cpu". Exit code 1 unless all pass on interlace; gloo is for comparison.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = "test/distributed/test_autograd.py"
LIMIT_SECONDS = 300


def said_by_tests(file: Path) -> dict[str, str]:
    """Return the error of each test of ``file`` on this rank, or ""."""
    stand_in: Any = SimpleNamespace(
        fixture=lambda **_: lambda function: function,
        mark=SimpleNamespace(multigpu_static=lambda function: function),
    )
    sys.modules["pytest"] = stand_in
    module: dict[str, Any] = {}
    exec(compile(file.read_text().replace("cuda:0", "cpu"), file, "exec"), module)
    said = {}
    for name in [name for name in module if name.startswith("test_")]:
        try:
            module[name]()
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return said


def run_rank(file: Path, backend: str) -> None:
    """Rank 0 prints a line of JSON: the errors of the tests, by rank."""
    import torch.distributed as dist

    from clients.physicsnemo_shared import set_up

    rank, ranks = set_up(backend)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, said_by_tests(file))
    if rank == 0:
        print(json.dumps(everyone))


def main(folder: Path) -> int:
    failures = 0
    for ranks in (2, 4):
        for backend in ("gloo", "interlace"):
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
            done = subprocess.run(
                [*command, __file__, str((folder / FILE).absolute()), backend],
                stdout=subprocess.PIPE,
                timeout=LIMIT_SECONDS,
                check=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            everyone = json.loads(done.stdout.splitlines()[-1])
            failed = {name: said for each in everyone for name, said in each.items() if said}
            passed = len(everyone[0]) - len(failed)
            print(f"{backend}, {ranks} ranks: {passed} of {len(everyone[0])} pass")
            for name, said in failed.items():
                print(f"    {name}: {said}")
            if backend == "interlace":
                failures += not passed or len(failed)
    return failures


if __name__ == "__main__":
    if sys.argv[2:]:
        run_rank(Path(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(main(Path(sys.argv[1])))
