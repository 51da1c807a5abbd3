"""torchrun's restarts: a rank dies, all of its generation are ended, and the next one completes."""

from pathlib import Path

from support import under_torchrun
from tiers import thorough

SCRIPT = """
import os, signal, torch, torch.distributed as dist, interlace

def say(text):
    os.write(1, f"{text}\\n".encode())  # whole lines, whatever the other rank says

generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("interlace")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # torchrun is to wait for what is said here
whole = torch.ones(1000)
dist.all_reduce(whole)
if generation == 0 and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(whole)
    interlace.all_reduce(whole)
except interlace.InterlaceError as error:
    left = dist.get_world_size(interlace.shrink())
    say(f"{error} in generation {generation}, {left} is left")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    while True:
        dist.all_reduce(whole)
place = dist.group.WORLD.interlace_communicator.place.name
say(f"rank {dist.get_rank()} of generation {generation} has {whole[-1]:.0f} in {place}")
dist.destroy_process_group()
"""


@thorough
def test_torchrun_restarts_all_ranks_after_a_death(tmp_path: Path) -> None:
    """One rank has continued alone meanwhile, and the store has keys of the first generation."""
    script = tmp_path / "elastic.py"
    script.write_text(SCRIPT)
    command = "torchrun --standalone --nproc-per-node=2 --max-restarts=1 --monitor-interval=0.1"
    said = under_torchrun(command, str(script))
    died, *completed = said.splitlines()
    assert died.startswith("rank 1 (pid") and died.endswith("all_reduce in generation 0, 1 is left")
    assert sorted(completed) == [f"rank {rank} of generation 1 has 8 in shm" for rank in (0, 1)]
