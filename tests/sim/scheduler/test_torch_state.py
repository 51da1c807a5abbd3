"""Ranks of a simulation share a thread, and keep what torch knows of a thread apart."""

import contextlib

import pytest
import torch

import interlace
from interlace import functional
from interlace.runtime.places.sim.scheduler import torch_state


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_modes_are_each_ranks_own(mode: str, seed: int) -> None:
    def on_rank() -> None:
        inside = interlace.get_rank() == 0
        for _ in range(3):
            with getattr(torch, mode)() if inside else contextlib.nullcontext():
                interlace.barrier()
                assert torch.is_grad_enabled() is not inside
                assert torch.ones(1).is_inference() is (inside and mode == "inference_mode")
        assert torch.is_grad_enabled() and not torch.ones(1).is_inference()

    interlace.run(on_rank, 3, seed=seed)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def doubled() -> torch.Tensor:
    """Wait within torch's dispatcher."""
    mine: torch.Tensor = functional.all_gather(torch.tensor([1.0 + interlace.get_rank()])) * 2
    return mine


@pytest.mark.parametrize("seed", range(4))
def test_warnings_have_the_handler_that_they_had(seed: int) -> None:
    """A handler on the stack of an ended rank would crash the next warning."""
    before = torch_state.warning_handler()
    assert before is not None
    interlace.run(doubled, 3, seed=seed)
    assert torch_state.warning_handler() == before


def test_dispatch_keys_are_left_as_they_were() -> None:
    before = torch._C._dispatch_tls_local_exclude_set()
    assert torch.equal(interlace.run(doubled, 2)[0], torch.tensor([2.0, 4.0]))
    assert torch._C._dispatch_tls_local_exclude_set() == before
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad


def drawn() -> list[float]:
    """Return random numbers from before and after the turns of other ranks."""
    torch.manual_seed(0)
    found = []
    for _ in range(3):
        found += torch.randn(2).tolist()
        interlace.barrier()
    torch.nn.Dropout()(torch.ones(interlace.get_rank() * 7))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_ranks_draw_as_in_processes(seed: int) -> None:
    (alone,) = interlace.run(drawn, 1)
    before = torch.get_rng_state()
    assert interlace.run(drawn, 3, seed=seed) == [alone] * 3
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_begin_to_draw_where_their_caller_is() -> None:
    def fails() -> None:
        drawn.append(torch.rand(1))
        interlace.barrier()
        raise ValueError

    drawn: list[torch.Tensor] = []
    with pytest.raises(ValueError):
        interlace.run(fails, 3)
    assert drawn == [torch.rand(1)] * 3
