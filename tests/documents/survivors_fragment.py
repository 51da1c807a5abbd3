"""Runs a fragment of docs/tutorials/from-sim-to-torchrun.md.

``train()`` calls ops until rank 1, by the page's story, has died.

``python survivors_fragment.py FILE``: three ranks run FILE; what rank 0 prints is printed.
"""

import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile

import torch
import torch.distributed as dist

import interlace


def train() -> None:
    for _ in range(10):
        dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(torch.ones(4))


def fragment(rank: int, file: str, meeting: str) -> None:
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    store = dist.FileStore(meeting, 3)
    dist.init_process_group("interlace", store=store, rank=rank, world_size=3)
    names = {"interlace": interlace, "dist": dist, "torch": torch, "train": train}
    exec(compile(pathlib.Path(file).read_text(), file, "exec"), names)
    dist.destroy_process_group()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (os.path.abspath(sys.argv[1]), f"{folder}/meeting")
        ranks = [context.Process(target=fragment, args=(rank, *arguments)) for rank in range(3)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit([process.exitcode for process in ranks] != [0, -signal.SIGKILL, 0])
