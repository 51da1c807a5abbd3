"""Ranks that drop groups of theirs: of test_backend_failures.py, and of tests/faults."""

import gc
import os
import threading
import time

import torch

import interlace
from guard import LIMIT
from multi.process_group.backend_ranks import own


def dropped_groups(count: int, pending: str, seconds: float = LIMIT / 2) -> bool:
    """Whether groups that nobody closed leave no descriptor and no thread, with ops that are pending."""

    def left() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd")) + threading.active_count()

    before = left()
    for _ in range(count):
        group = interlace.new_group(range(interlace.get_world_size()))
        group.barrier()
        if pending == "op":
            interlace.all_reduce(own(), group=group, async_op=True).wait()
        if pending and interlace.get_rank() == 0:  # on no other rank, so it cannot end by itself
            if pending == "op":
                interlace.all_reduce(own(), group=group, async_op=True)
            elif pending == "message":
                interlace.irecv(own(), 1, group=group)
            else:
                interlace.isend(torch.ones(100_000), 1, group=group)
        del group
    interlace.barrier()
    until = time.monotonic() + seconds
    while left() > before and time.monotonic() < until:
        time.sleep(1e-2)
    return left() <= before
