"""Attention over a sequence that is spread over ranks, against torch's; and decoding with a spread cache.

M is the number of all ranks' tokens, N of the heads of queries, K their size. Tokens are distributed as by
zigzag, in 2 W chunks.

The baseline through torch.distributed is the ring of torch's ``context_parallel``, if that runs without a
GPU: under a causal mask, with as many heads of keys as of queries. The ring takes an op that returns output
and logarithms. Here that is torch's op for CPUs, which interlace's "pipelined" also calls. Otherwise keys
and values are gathered, followed by torch's attention.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
from interlace import reference
from interlace.benchmark import protocol
from interlace.benchmark.baselines import TORCH
from interlace.benchmark.figures import bus_factor
from interlace.benchmark.fused import ByRows, Expected
from interlace.benchmark.plain import Tensors
from interlace.ops.attention.problem import AttentionReference
from interlace.runtime.core.place import Place
from interlace.runtime.tuning.tuning import Problem

QUERY, KEY, VALUE, GRAD = range(4)
LARGEST = 2.0  # in a payload
_aten: Any = torch.ops.aten


def _ring_forward(query: Any, key: Any, value: Any, *, is_causal: bool) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)


def _ring_backward(*, grad_out: Any, query: Any, key: Any, value: Any, **rest: Any) -> Any:
    saved = rest["out"], rest["logsumexp"], 0.0, rest["is_causal"]
    op = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return op(grad_out, query, key, value, *saved)


class _HeadTensors(ByRows):
    """Tensors ``[batch, tokens, heads, size]``; all ranks' tensors are parts of one whole."""

    without = "has tokens (--m), heads (--n) and their size (--k)"
    defaults: ClassVar = {"n": "8", "k": "64"}
    settings: tuple[str, ...] = ("batch", "key_heads")
    varied = tuple(
        {"block_m": block_m, "block_n": block_n} for block_m in (64, 128) for block_n in (32, 64)
    )

    def __init__(
        self,
        place: Place,
        dtype: torch.dtype,
        *sizes: int,
        batch: int | None = None,
        key_heads: int | None = None,
        mask: str | None = None,
    ) -> None:
        super().__init__(place, dtype, *sizes)
        self.head_dim, self.batch = self.shape["k"], batch or 1
        self.key_heads, self.causal = key_heads or self.n, mask != "full"
        more = {"batch": batch, "key heads": key_heads}
        self.shape |= {name: value for name, value in more.items() if value is not None}

    @classmethod
    def refuse(cls, world_size: int, sizes: Sequence[int], dtype: str, **settings: Any) -> None:
        super().refuse(world_size, sizes, dtype)
        n = sizes[1]
        key_heads = settings.get("key_heads", n)
        if n % key_heads:
            raise ValueError(
                f"--key-heads {key_heads}: does not divide --n {n}, the heads of queries"
            )

    @classmethod
    def memory(cls, dtype: torch.dtype, *sizes: int, **settings: Any) -> int:
        batch: int = settings.get("batch", 1)
        return 4 * batch * super().memory(dtype, *sizes)

    def tokens(self, operand: int, places: torch.Tensor, heads: int, call: int) -> torch.Tensor:
        first = torch.arange(self.batch, device=self.device) * self.m
        rows = (first[:, None] + places).view(-1)
        flat = protocol.some_rows(rows, heads * self.head_dim, operand, call, self.dtype)
        return flat.view(self.batch, len(places), heads, self.head_dim)

    def keys(self, places: torch.Tensor, call: int) -> list[torch.Tensor]:
        return [self.tokens(operand, places, self.key_heads, call) for operand in (KEY, VALUE)]

    def known(self, heads: list[torch.Tensor], mask: torch.Tensor) -> AttentionReference:
        query, key, value = heads
        return AttentionReference(query, key, value, mask, 1 / math.sqrt(self.head_dim))

    def rounded(self, value: torch.Tensor, bound: torch.Tensor) -> Expected:
        """Widen the bound: torch rounds each rank's result before it is merged."""
        merged = bound + 2 * LARGEST * reference.unit_roundoff(self.dtype)
        return value, bound, merged


class AttentionRows(_HeadTensors):
    """Attention with the op's algorithms, after a method if the method makes a difference."""

    op = "context_parallel_attention"
    settings = (*_HeadTensors.settings, "mask")
    scatters = shards = True
    passes = 2.0  # products of queries and keys, and of weights and values

    def __init__(self, place: Place, dtype: torch.dtype, *sizes: int, **settings: Any) -> None:
        super().__init__(place, dtype, *sizes, **settings)
        rows = torch.arange(self.m, device=self.device)
        chunk = self.m // (2 * self.world_size)
        chunks = [[r, 2 * self.world_size - 1 - r] for r in range(self.world_size)]
        by_rank = [torch.cat([rows[c * chunk : (c + 1) * chunk] for c in each]) for each in chunks]
        self.places, self.gathered = by_rank[self.rank], torch.cat(by_rank)
        seen = 0.5 if self.causal else 1.0
        self.nbytes = 2 * self.batch * self.m * self.key_heads * self.head_dim * dtype.itemsize
        self.bus_factor = bus_factor("all_gather", self.world_size)
        pairs = seen * self.m * self.rows * self.batch * self.n
        self.flops = self.passes * 2 * pairs * self.head_dim

    @functools.cached_property
    def _mask(self) -> torch.Tensor | None:
        return self.places[:, None] >= self.gathered if self.causal else None

    @classmethod
    def refuse(cls, world_size: int, sizes: Sequence[int], dtype: str, **settings: Any) -> None:
        super().refuse(world_size, sizes, dtype, **settings)
        chunks = 2 * world_size
        if sizes[0] % chunks:
            raise ValueError(
                f"--m {sizes[0]}: {cls.op} shares tokens out in {chunks} equal chunks, two to a rank"
            )

    def inputs(self, call: int) -> Tensors:
        return (self.tokens(QUERY, self.places, self.n, call), *self.keys(self.places, call))

    def _given(self, algorithm: str) -> dict[str, Any]:
        *method, way = algorithm.split()
        return {"method": method[0] if method else "auto", "algorithm": way, "causal": self.causal}

    def ours(self, algorithm: str) -> Callable[..., Any]:
        options = self._given(algorithm)

        def run(*tensors: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                result = interlace.nn.functional.context_parallel_attention(*tensors, **options)
                return interlace.functional.wait(result)

        return run

    def ring(self) -> Any:
        """Return torch's module of its ring, None if it cannot be called."""
        known = self.device.type == "cpu" and self.collectives is TORCH
        if not known or not self.causal or self.key_heads != self.n:
            return None
        try:
            from torch.distributed.tensor.experimental._context_parallel import _attention
        except ImportError:
            return None
        return _attention if hasattr(_attention, "_templated_ring_attention") else None

    def theirs(self, *tensors: Any) -> Any:
        ring: Any = self.ring()
        with torch.no_grad():
            if ring is None:
                query, *heads = tensors
                return self._attend(query, *self._all_keys(*heads))
            heads = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
            options = dist.group.WORLD, 2, _ring_forward
            return ring._templated_ring_attention(*options, *heads, is_causal=True)[0].transpose(
                1, 2
            )

    def _all_keys(self, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        both = torch.stack([key, value])
        gathered = both.new_empty(self.world_size, *both.shape)
        self.collectives.all_gather(gathered.flatten(0, 1), both)  # gloo does not stack
        return list(gathered.permute(1, 2, 0, 3, 4, 5).flatten(2, 3).unbind(0))

    def _attend(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Attend from this rank's queries to all keys in gathered order."""
        query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
        mask, shares = self._mask, self.key_heads != self.n
        result = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=shares
        )
        return result.transpose(1, 2)

    def _reference(self, places: torch.Tensor, *tensors: torch.Tensor) -> AttentionReference:
        """Return a reference for queries at these places of the whole, and all keys in their order."""
        heads = [tensor.transpose(1, 2) for tensor in tensors]
        mask = places[:, None] >= torch.arange(self.m, device=self.device)
        mask = mask if self.causal else torch.ones_like(mask)
        return self.known(heads, mask)

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        all_rows, places = torch.arange(self.m, device=self.device), self.places[rows]
        query = self.tokens(QUERY, places, self.n, call)
        value, bound = self._reference(places, query, *self.keys(all_rows, call)).output()
        return self.rounded(value.permute(2, 0, 1, 3), bound.permute(2, 0, 1, 3))

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        return super().check(result.transpose(0, 1), call, rounds_often)


class AttentionBackwardRows(AttentionRows):
    """Forward and backward, as in a step of training; results are gradients, and all are compared."""

    op = "context_parallel_attention_backward"
    passes = 7.0  # two forward, five backward

    def __init__(self, place: Place, dtype: torch.dtype, *sizes: int, **settings: Any) -> None:
        super().__init__(place, dtype, *sizes, **settings)
        self._known: dict[int, Any] = {}

    def inputs(self, call: int) -> Tensors:
        return (*super().inputs(call), self.tokens(GRAD, self.places, self.n, call))

    def ours(self, algorithm: str) -> Callable[..., Any]:
        options = self._given(algorithm)

        def run(*tensors: torch.Tensor) -> Any:
            *tensors, grad = tensors  # type: ignore[assignment]
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            result = interlace.nn.functional.context_parallel_attention(*leaves, **options)
            return torch.autograd.grad(result, leaves, grad)

        return run

    def theirs(self, *tensors: Any) -> Any:
        *tensors, grad = tensors  # type: ignore[assignment]
        ring: Any = self.ring()
        if ring is None:
            return self._gathered(grad, *tensors)
        with torch.no_grad():
            of_output, *heads = (each.transpose(1, 2).contiguous() for each in (grad, *tensors))
            options = dist.group.WORLD, 2
            out, lse, *_ = ring._templated_ring_attention(
                *options, _ring_forward, *heads, is_causal=True
            )
            grads = ring._templated_ring_attention_backward(
                *options, _ring_backward, of_output, "grad_out", *heads, out, lse, is_causal=True
            )
            return [each.transpose(1, 2) for each in grads[:3]]

    def _gathered(self, grad: torch.Tensor, query: torch.Tensor, *keys: torch.Tensor) -> Any:
        """Run torch's attention to gathered keys; contributions to their gradients are reduced."""
        leaves = [each.detach().requires_grad_() for each in (query, *self._all_keys(*keys))]
        of_query, *of_keys = torch.autograd.grad(self._attend(*leaves), leaves, grad)
        parts = torch.unflatten(torch.stack(of_keys), 2, (self.world_size, -1))
        by_rank = parts.permute(2, 0, 1, 3, 4, 5).contiguous()
        part = torch.empty_like(by_rank[0])
        self.collectives.reduce_scatter(part, by_rank.flatten(0, 1))
        return of_query, *part.unbind(0)

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        """Check one head of keys, another in each call, with the heads of queries that see it."""
        head, groups = call % self.key_heads, self.n // self.key_heads
        queries = slice(head * groups, (head + 1) * groups)
        if call not in self._known:
            rows = torch.arange(self.m, device=self.device)
            query, grad = (self.tokens(w, rows, self.n, call)[:, :, queries] for w in (QUERY, GRAD))
            keys = [key[:, :, head : head + 1] for key in self.keys(rows, call)]
            found = self._reference(rows, query, *keys).gradients(grad.transpose(1, 2))
            self._known[call] = [[part[:, :, self.places] for part in each] for each in found]
        worst = 0.0
        for grads, (value, bound), heads in zip(
            result, self._known[call], (queries, *[slice(head, head + 1)] * 2), strict=True
        ):
            if rounds_often:
                # scores are rounded already, for half of the bound, and so is each partial sum
                bound = bound * (1 + (self.world_size + 1) / 2)
            mine = grads[:, :, heads].transpose(1, 2)
            worst = max(worst, reference.worst_ratio(mine, value, bound))
        return worst


class DecodeRows(_HeadTensors):
    """Decoding. torch attends to this rank's keys; results and logarithms are gathered and merged."""

    op = "distributed_decode"
    varied = ({"block_n": 32}, {"block_n": 64}, {"block_n": 128})

    def __init__(
        self, place: Place, dtype: torch.dtype, *sizes: int, paged: bool = False, **settings: Any
    ) -> None:
        """``paged``: interlace's keys are in pages in random order."""
        super().__init__(place, dtype, *sizes, **settings)
        self.paged = paged
        read = self.batch * self.rows * self.head_dim
        self.nbytes = 2 * read * self.key_heads * dtype.itemsize
        self.bus_factor, self.flops = None, 4 * read * self.n
        self.result_rows = (0, self.batch)

    @classmethod
    def problem(
        cls, dtype: torch.dtype, sizes: Sequence[int], world_size: int, **settings: Any
    ) -> Problem:
        """Return the problem of one token: ranks do not know the lengths of each other's caches."""
        return Problem(cls.op, dtype, 1, sizes[1], sizes[2], world_size)

    def _query(self, call: int) -> torch.Tensor:
        return self.tokens(QUERY, torch.zeros(1, device=self.device).long(), self.n, call)[:, 0]

    def inputs(self, call: int) -> Tensors:
        places = torch.arange(self.own, self.own + self.rows, device=self.device)
        return self._query(call), *self.keys(places, call)

    def ours(self, algorithm: str) -> Callable[..., Any]:
        op: Any = interlace.distributed_decode
        if not self.paged:
            return lambda q, k, v: op(q, (k, v), algorithm=algorithm)
        shape = math.gcd(self.rows, 16), self.key_heads, self.head_dim
        count = self.batch * self.rows // shape[0]
        table = torch.arange(count, device=self.device).flip(0).view(self.batch, -1)

        def run(query: torch.Tensor, *keys: torch.Tensor) -> torch.Tensor:
            pages = [key.view(-1, *shape).flip(0) for key in keys]
            output: torch.Tensor = op(query, pages, block_table=table, algorithm=algorithm)
            return output

        return run

    def _partial(self, query: torch.Tensor, *keys: torch.Tensor) -> torch.Tensor:
        """Return fp32 ``[batch, key heads, queries, size + 1]``: the result, then the logarithm."""
        groups = query.view(self.batch, self.key_heads, -1, self.head_dim)
        heads = [groups, *(key.transpose(1, 2) for key in keys)]
        if self.device.type == "cpu":
            output, sums = _aten._scaled_dot_product_flash_attention_for_cpu(*heads)
        else:
            op = _aten._scaled_dot_product_efficient_attention
            output, sums, *_ = op(*heads, None, True)
        lse = sums[..., : groups.shape[2]].unsqueeze(-1)
        return torch.cat([output.float(), lse.float()], -1)

    def theirs(self, *tensors: Any) -> Any:
        part = self._partial(*tensors)
        gathered = part.new_empty(self.world_size, *part.shape)
        self.collectives.all_gather(gathered.flatten(0, 1), part)
        weights = gathered[..., -1:].softmax(0)
        merged = (gathered[..., :-1] * weights).sum(0)
        return merged.flatten(1, 2).to(self.dtype)

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        every = torch.arange(self.m, device=self.device)
        query, keys = self._query(call).unsqueeze(2), self.keys(every, call)
        mask = torch.ones(1, self.m, dtype=torch.bool, device=self.device)
        heads = [query, *(key.transpose(1, 2) for key in keys)]
        known = self.known(heads, mask).output()
        value, bound = (each[rows, :, 0] for each in known)
        return self.rounded(value, bound)
