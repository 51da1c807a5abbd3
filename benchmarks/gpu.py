"""Measurements on one GPU: ``python benchmarks/gpu.py [--part NAME] [--out FILE]``.

docs/explanation/performance.md describes the parts.

Every candidate's result is compared with a reference in the same run; a wrong one has no time. A case that
fails is recorded with its error, and the next begins. Writes JSON with device, driver, versions and commit,
anew after every case. ``--dry-run`` runs every part in place "sim" on small shapes
to check the benchmark itself; its times mean nothing and are not written. Under 8 minutes on an H200.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from circumstances import new_result

PARTS = {  # with their files in gpu_parts
    "matmul": "shapes", "variants": "shapes", "ops": "host", "virtual": "overlap",
    "slow-link": "overlap", "small": "shapes", "host": "host", "sanitizer": "host",
}  # fmt: skip
SECONDS = 480.0

Record = dict[str, Any]


def _part(name: str) -> Callable[[bool, int], Iterator[Record]]:
    module = importlib.import_module(f"gpu_parts.{PARTS[name]}")
    part: Callable[[bool, int], Iterator[Record]] = getattr(module, name.replace("-", "_"))
    return part


def circumstances() -> Record:
    from circumstances import circumstances as of_host, said_by

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        **of_host(),
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": driver,
        "cuda": torch.version.cuda,
        "protocol": "events; candidates alternate; medians and quartiles; inputs rotate past the L2",
    }


def line(record: Record) -> str:
    times = ", ".join(f"{k} {v['median']:,.1f}" for k, v in record["microseconds"].items())
    derived = ", ".join(f"{k} {v:.3f}" for k, v in record["derived"].items())
    found = f"FAILED: {record['error']}" if "error" in record else f"us: {times}  {derived}"
    return f"{record['part']:9} {record['case']:44} {found}".rstrip()


def write(out: Path, facts: Record, records: list[Record]) -> None:
    """All of ``records``, in place of what is there; whoever is killed meanwhile leaves that."""
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_name(f"{out.name}.new")
    new.write_text(json.dumps({**facts, "records": records}, indent=1) + "\n")
    os.replace(new, out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; repeatable")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON file (default: a new one in results/)")
    parser.add_argument("--dry-run", action="store_true", help="check the benchmark without a GPU")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "this benchmark needs a CUDA device, and torch sees none; --dry-run checks it without"
        )
        return 2
    if options.dry_run and torch.cuda.is_available():
        print("--dry-run is for machines without a GPU; set CUDA_VISIBLE_DEVICES= to hide it")
        return 2
    facts = {} if options.dry_run else circumstances()
    out = options.out
    if not options.dry_run and out is None:
        slug = str(facts["device"]).lower().replace("nvidia ", "").replace(" ", "-")
        out = new_result(f"gpu-{slug}", facts)
    records: list[Record] = []
    started, failed = time.monotonic(), False
    for name in options.part or PARTS:
        spent = time.monotonic() - started
        print(f"-- {name} ({spent:.0f} s so far)", flush=True)
        if spent > SECONDS:
            print(f"   left out: {SECONDS:.0f} s are over")
            failed = True
            continue
        try:
            for found in _part(name)(
                options.dry_run, 1 if options.dry_run else options.repetitions
            ):
                print(line(found), flush=True)
                records.append(found)
                if not options.dry_run:
                    write(out, facts, records)  # later parts may be cut off
        except Exception as error:  # the other parts are still worth their time
            print(f"   FAILED: {type(error).__name__}: {error}")
            failed = True
    broken = [record["case"] for record in records if "error" in record]
    if broken:
        print(f"{len(broken)} of {len(records)} cases failed: {'; '.join(broken)}")
    wrong = [
        record["case"] for record in records if not record["correct"] and "error" not in record
    ]
    if wrong:
        print(f"wrong results: {'; '.join(wrong)}")
    if options.dry_run:
        print("a dry run: the times above are an interpreter's, and are not written")
    else:
        print(f"written to {out}")
    return 1 if failed or broken or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
