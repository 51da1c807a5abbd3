"""The demo across processes: each rank records for itself, and the parts fit together."""

import torch

from interlace.cli.commands.demo import CASES, DemoOptions, from_text, run_case
from interlace.runtime.places.sim.scheduler.recording import MICROSECONDS


def test_parts_of_all_processes_become_one_recording() -> None:
    work = from_text(None, torch.bfloat16, 0, 45, 40, 24)
    outcome = run_case(CASES[2], work, DemoOptions(ranks=3, place="shm"))
    recording = outcome.recording
    assert outcome.correct and recording is not None and recording.unit == MICROSECONDS
    ended_by = recording.ended_by()
    for rank in range(3):
        assert recording.bytes_sent(rank) == (15 * 24 * 2 + 30 * 24) * 2
        assert {tile.peer for tile in recording.tiles(rank)} == {0, 1, 2}
        waits = [wait for wait in ended_by if wait.rank == rank]
        # One wait is for the slots of all sources: it ends with whichever comes last.
        assert waits and {ended_by[wait].source for wait in waits} <= {0, 1, 2}
        assert {signal.source for signal in recording.arrivals(rank)} == {0, 1, 2} - {rank}
