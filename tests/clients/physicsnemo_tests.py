"""PhysicsNeMo's own tests of its distributed autograd, on gloo and on interlace, with 2 ranks and with 4.

    make clients PHYSICSNEMO=folder     its repository at the installed release

Its wheel has no tests. The tests of ``FILE`` gather, scatter and exchange shards of unequal lengths. They
ask for a GPU per rank. Here they run without the fixture that skips them on a CPU, and "cuda:0" in their
text is "cpu". Exit code 1 unless all pass on interlace; gloo is for comparison.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = "test/distributed/test_autograd.py"


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
    from support import under_torchrun

    failures = 0
    for ranks in (2, 4):
        for backend in ("gloo", "interlace"):
            command = f"torchrun --nproc-per-node={ranks} {__file__}"
            printed = under_torchrun(command, str((folder / FILE).absolute()), backend)
            everyone = json.loads(printed.splitlines()[-1])
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
