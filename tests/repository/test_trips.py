"""Limits of trips: how many files a call enters on its way, and how often it changes between them."""

import sys

import pytest

from tiers import thorough

LIMITS = {  # files, changes
    "all_gather_matmul, shm": (15, 36),
    "the same with a gradient": (20, 82),
    "all_gather_matmul, planned, cuda": (8, 16),
    "dist.all_reduce, 4 KiB, shm": (8, 10),
}


@thorough
@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs code objects' qualified names")
def test_no_trip_is_longer() -> None:
    from repository import trips

    found = {name: (len(set(trip)), len(trip) - 1) for name, trip in trips.trips().items()}
    assert found.keys() == LIMITS.keys()
    for name, (files, changes) in found.items():
        most_files, most_changes = LIMITS[name]
        assert files <= most_files and changes <= most_changes, (name, files, changes)
