"""Runs a fragment of docs/how-to/train/megatron.md.

``model`` is the page's own GPT, ``megatron`` interlace's module.

``python megatron_fragment.py FILE``: two ranks run FILE; what rank 0 prints is printed.
"""

import contextlib
import io
import pathlib
import sys
import tempfile
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

import interlace
from interlace.integrations import megatron

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import pages


def gpt() -> dict[str, Any]:
    """The names of the page's ``gpt.py``."""
    every = pages.blocks((pages.ROOT / "docs/how-to/train/megatron.md").read_text())
    (text,) = (block.text for block in every if block.file == "gpt.py")
    names: dict[str, Any] = {"__name__": "gpt"}
    exec(compile(text, "gpt.py", "exec"), names)
    return names


def fragment(file: str, meeting: str) -> str:
    """What one rank prints."""
    rank, ranks = interlace.get_rank(), interlace.get_world_size()
    store = dist.FileStore(meeting, ranks)
    dist.init_process_group("interlace", store=store, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    names = {"model": gpt()["build"](ranks), "megatron": megatron}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(pathlib.Path(file).read_text(), file, "exec"), names)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return printed.getvalue()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(interlace.run(fragment, 2, sys.argv[1], f"{folder}/meeting", place="shm")[0], end="")
