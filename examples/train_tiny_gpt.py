"""Train a small GPT with tensor and sequence parallelism and data parallelism, and check it.

    python examples/train_tiny_gpt.py                             # starts its 4 ranks itself
    torchrun --nproc-per-node 4 examples/train_tiny_gpt.py        # runs on the ranks of torchrun
    python examples/train_tiny_gpt.py --data-parallel fsdp        # FSDP2 in place of DDP
    python examples/train_tiny_gpt.py --experts 4                 # mixtures of experts, spread over --tp

It needs no GPU. Ranks form a mesh of ``--dp`` times ``--tp``. Each of the ``dp`` groups has the whole
model, split over its ``tp`` ranks (tiny_gpt.py), and its part of every batch. DDP or FSDP2 averages
gradients over the groups. With ``--context-parallel`` each group becomes that many groups, each with its
part of the sequences; attention gets the keys of all. Halfway all ranks write a checkpoint. Then

  - the same model with layers of torch.nn, unsharded and in one process, is trained on the whole batches;
  - ``--resume-dp`` times ``--resume-tp`` ranks read the checkpoint and continue the training from there;
  - the losses are compared, step by step. If any differs by more than 1e-5 of it, the exit status is 1.

The runs differ only in the order of sums, so float32 is enough for that.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from tiny_gpt import GPT, Shape, ShardedGPT, text
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import interlace
from interlace import nn

TOLERANCE = 1e-5  # relative to the loss
Losses = dict[int, float]  # by step


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if "RANK" in os.environ:  # torchrun has started this script on all ranks
        found = train(options, options.dp * options.context_parallel, options.tp)
        if int(os.environ["RANK"]) != 0:
            return  # rank 0 does the rest
    else:
        found = on_new_ranks(options, options.dp * options.context_parallel, options.tp)
    expected = reference(options)
    resumed = on_new_ranks(options, options.resume_dp, options.resume_tp, first=options.steps // 2)
    plot(options.out / "loss.png", expected, found, resumed)
    ranks = f"{options.dp * options.context_parallel * options.tp} ranks"
    fewer = f"{options.resume_dp * options.resume_tp} ranks"
    good = [
        compare(f"{ranks} and one process", found, expected),
        compare(f"{fewer} resumed and one process", resumed, expected),
    ]
    sys.exit(0 if all(good) else 1)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="ranks that the model is split over")
    parser.add_argument(
        "--dp", type=int, default=2, help="groups of --tp ranks, which share the batch"
    )
    parser.add_argument(
        "--context-parallel",
        type=int,
        default=1,
        help="groups of --tp ranks that share a sequence, for each of --dp",
    )
    parser.add_argument("--data-parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--resume-tp", type=int, default=2, help="tp of the ranks that resume")
    parser.add_argument("--resume-dp", type=int, default=1, help="dp of the ranks that resume")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step of all groups")
    parser.add_argument(
        "--out", type=Path, default=Path("tiny_gpt"), help="folder for the files that it writes"
    )
    for name, value in vars(Shape()).items():
        if name != "experts":
            parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--experts", type=int, default=0, help="experts in each block (default none)"
    )
    options = parser.parse_args(arguments)
    ranks = ("dp", "tp", "resume_dp", "resume_tp", "context_parallel")
    least = {name: 1 for name in (*ranks, "batch", *vars(Shape()))}
    if options.experts:
        least["experts"] = 2
    else:
        del least["experts"]
    for name, number in {**least, "steps": 2}.items():
        if vars(options)[name] < number:
            parser.error(f"--{name.replace('_', '-')} must be at least {number}")
    if options.hidden % options.heads:
        parser.error(f"--heads {options.heads} must divide --hidden {options.hidden}")
    for split in ("tp", "resume_tp"):
        for name in ("heads", "hidden", "length", "experts"):
            if (number := vars(options)[name]) % vars(options)[split]:
                parser.error(f"--{split.replace('_', '-')} must divide --{name} {number}")
    if options.length % (options.context_parallel * options.tp):
        parser.error(f"--context-parallel times --tp must divide --length {options.length}")
    if options.length >= len(text()):
        parser.error(f"--length must be below the {len(text())} bytes of the text")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is not a folder")
    if options.batch % options.dp or options.batch % options.resume_dp:
        parser.error(f"--dp and --resume-dp must divide --batch {options.batch}")
    wanted = options.dp * options.context_parallel * options.tp
    started = int(os.environ.get("WORLD_SIZE", wanted))
    if started != wanted:
        shared = f" times --context-parallel {options.context_parallel}"
        parser.error(
            f"--dp {options.dp}{shared if options.context_parallel > 1 else ''} times --tp {options.tp} "
            f"must be the number of started ranks, {started}"
        )
    sizes = options.hidden, options.heads, options.layers, options.length, options.experts
    options.shape = Shape(*sizes)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def on_new_ranks(options: argparse.Namespace, dp: int, tp: int, first: int = 0) -> Losses:
    """Run :func:`train` in processes of this host."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        every = interlace.run(
            train, dp * tp, options, dp, tp, first, meeting, place="shm", timeout=1000
        )
    return every[0]  # the result is equal on all ranks


def train(
    options: argparse.Namespace, dp: int, tp: int, first: int = 0, meeting: str | None = None
) -> Losses:
    """Train as one rank, from step ``first``; if that is not 0, start from the checkpoint.

    ``dp`` includes the ranks that share a sequence because of ``--context-parallel``.
    """
    cp = 1 if first else options.context_parallel
    if meeting is None:  # torchrun has set the variables for the meeting
        dist.init_process_group("interlace")
    else:
        rank, world_size = interlace.get_rank(), interlace.get_world_size()
        dist.init_process_group("interlace", meeting, rank=rank, world_size=world_size)
    try:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("data", "tensor"))
        torch.manual_seed(0)  # equal on all ranks, which keep their parts of the same weights
        context = None
        if cp > 1:  # the same ranks, as a mesh with three dimensions
            names = ("data", "context", "tensor")
            cube = init_device_mesh("cpu", (dp // cp, cp, tp), mesh_dim_names=names)
            context = (cube, "context")
        model = ShardedGPT(options.shape, group=(mesh, "tensor"), context=context)
        parallel = data_parallel(model, mesh, options.data_parallel if dp > 1 else None)
        optimizer = adam(parallel)
        folder = options.out / "checkpoint"
        if first:
            load(model, optimizer, folder)
        elif dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # left by an earlier run

        def step(number: int) -> float:
            if number == options.steps // 2 and not first:
                checkpoint.save(states(model, optimizer), checkpoint_id=folder)
            share = mesh.get_local_rank("data") // cp
            tokens = batch(number, options).chunk(dp // cp, 1)[share]
            loss = update(parallel, optimizer, tokens)
            dist.all_reduce(loss, group=mesh.get_group("data"))
            return loss.item() / dp

        name = f"{dp * tp} ranks" + (f" from step {first}" if first else "")
        return loop(name, range(first, options.steps), step, talks=dist.get_rank() == 0)
    finally:
        dist.destroy_process_group()


def reference(options: argparse.Namespace) -> Losses:
    """Return the losses of the unsharded model in this process."""
    torch.manual_seed(0)
    model = GPT(options.shape)
    optimizer = adam(model)

    def step(number: int) -> float:
        return update(model, optimizer, batch(number, options)).item()

    return loop("one process", range(options.steps), step)


def data_parallel(model: torch.nn.Module, mesh: DeviceMesh, kind: str | None) -> torch.nn.Module:
    """Return ``model`` with gradients averaged over the groups, with the same parameters and layers."""
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group("data"))
    if kind == "fsdp":  # also splits parameters and the optimizer's state over the groups
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """Return the contents of a checkpoint, which are the same on any number of ranks."""
    return {
        "model": nn.sharded_state_dict(model),
        "optimizer": nn.sharded_optimizer_state_dict(model, optimizer),
    }


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load weights and moments in place; only tensors that FSDP2 has split must be copied back."""
    found = states(model, optimizer)
    checkpoint.load(found, checkpoint_id=folder)
    model.load_state_dict(found["model"])
    nn.load_optimizer_state_dict(model, optimizer, found["optimizer"])


def batch(step: int, options: argparse.Namespace) -> torch.Tensor:
    """Return bytes ``[length + 1, batch]`` from random places, the same on all ranks and in all runs."""
    whole, generator = text(), torch.Generator().manual_seed(step)
    places = torch.randint(len(whole) - options.length, (options.batch,), generator=generator)
    return whole[places + torch.arange(options.length + 1).unsqueeze(1)]


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> torch.Tensor:
    """Do one step on ``tokens``; return its loss. Gradients are complete: docs/how-to/train/layers.md."""
    optimizer.zero_grad()
    loss = model(tokens[:-1], tokens[1:])
    loss.backward()
    optimizer.step()
    return loss.detach()


def loop(name: str, steps: range, step: Callable[[int], float], talks: bool = True) -> Losses:
    """Return the losses of all ``steps``, and print some of them."""
    torch.set_num_threads(1)  # ranks share the cores; more threads would only wait for each other
    start, losses = time.monotonic(), {}
    for number in steps:
        losses[number] = step(number)
        if talks and ((number + 1) % 10 == 0 or number + 1 == steps.stop):
            seconds = time.monotonic() - start
            print(
                f"{name:21} step {number + 1:3} loss {losses[number]:.6f} {seconds:5.1f} s",
                flush=True,
            )
    return losses


def compare(what: str, found: Losses, expected: Losses) -> bool:
    """Print and return whether all losses of ``found`` are within the tolerance."""
    apart = [abs(loss - expected[step]) / expected[step] for step, loss in found.items()]
    good, worst = all(each <= TOLERANCE for each in apart), max(apart)  # nan is not good
    said = "the same losses" if good else "OTHER LOSSES"
    print(f"{said}: {what}, {len(found)} steps, {worst:.1e} apart at most, {TOLERANCE:.0e} allowed")
    return good


def plot(path: Path, expected: Losses, found: Losses, resumed: Losses) -> None:
    """Draw the three curves, and their differences below them."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot, because matplotlib is not installed: pip install 'interlace[plot]'")
        return
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot(expected.keys(), expected.values(), "k", label="unsharded, one process")
    for losses, mark, label in ((found, "o", "sharded"), (resumed, "x", "resumed on other ranks")):
        above.plot(losses.keys(), losses.values(), mark, fillstyle="none", label=label)
        apart = [abs(loss - expected[step]) / expected[step] for step, loss in losses.items()]
        below.semilogy(losses.keys(), apart, mark, fillstyle="none")
    below.axhline(TOLERANCE, color="k", linestyle=":")
    above.set_ylabel("loss per byte (nats)")
    below.set_ylabel("relative difference")
    below.set_xlabel("step")
    above.legend()
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
