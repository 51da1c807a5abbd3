"""Ranks of test_attention_shm.py. A module of its own, because new processes import it."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import interlace
from cases.attention_cases import AttentionCase, attend
from cases.head_exchange_cases import ExchangeCase, exchanged, layered
from interlace import nn

HOW: dict[str, Any] = {"causal": True, "window": (5, -1), "layout": "sbhd"}


def attended(case: AttentionCase, method: str, algorithm: str) -> list[torch.Tensor]:
    return attend(case, method, algorithm)


def projected(case: ExchangeCase, algorithm: str) -> dict[str, torch.Tensor]:
    return exchanged(case, algorithm)


def in_layer(*case: Any) -> float:
    return layered(*case)


def compiled_layer() -> list[str]:
    """As :func:`compiled`, of the layer with projections."""
    torch.manual_seed(0)
    module = nn.UlyssesAttention(16, 4, 2, 8, True, causal=True)
    torch.manual_seed(interlace.get_rank())
    x = torch.randn(2, 6, 16)
    found = []
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        output = call(leaf)
        output.square().sum().backward()
        grads = [each.grad for each in module.parameters()]
        found.append([output.detach(), leaf.grad, *grads])
    return [str(n) for n, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)]


def _own() -> list[torch.Tensor]:
    torch.manual_seed(interlace.get_rank())
    return [torch.randn(10, 1, heads, size) for heads, size in ((4, 8), (2, 8), (2, 6))]


def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = nn.functional.context_parallel_attention(q * 2, k, v, **HOW)
    return output + 1


def compiled() -> list[str]:
    """What differs between eager and compiled, results and gradients; a graph breaks nowhere."""
    wrong = []
    eager, again = ([each.requires_grad_() for each in _own()] for _ in range(2))
    results = [layer(*eager), torch.compile(layer, fullgraph=True, backend="aot_eager")(*again)]
    for result in results:
        result.square().sum().backward()
    if not torch.equal(*results):
        wrong.append("output")
    wrong += [f"gradient of {name}" for name, a, b in zip("qkv", eager, again, strict=True)
              if a.grad is None or b.grad is None or not torch.equal(a.grad, b.grad)]  # fmt: skip
    return wrong


def traced() -> list[str]:
    """A graph has the op where the call is; fake tensors go through it."""
    wrong, own = [], _own()
    graph = make_fx(layer)(*own)
    names = [str(node.target) for node in graph.graph.nodes]
    if sum("interlace.context_parallel_attention.default" in name for name in names) != 1:
        wrong.append(f"nodes {names}")
    if not torch.equal(graph(*own), layer(*own)):
        wrong.append("output of the graph")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in own]
        if layer(*fakes).shape != (10, 1, 4, 6):
            wrong.append("shape of a fake")
    return wrong


def differentiated_twice() -> str:
    own = [each.requires_grad_() for each in _own()]
    grads = torch.autograd.grad(layer(*own).square().sum(), own, create_graph=True)
    try:
        grads[0].sum().backward()
    except RuntimeError as error:
        return str(error)
    return "a gradient"


def decoding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return interlace.functional.distributed_decode(q * 2, (k, v))[0] + 1


def decoded_in_graphs() -> list[str]:
    """A graph has the op once; compiled it gives what it gives at once, and no gradient."""
    wrong = []
    torch.manual_seed(0)
    own = torch.randn(2, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 6)
    right = interlace.distributed_decode(own[0] * 2, own[1:]) + 1
    graph = make_fx(decoding)(*own)
    names = [str(node.target) for node in graph.graph.nodes]
    if sum("interlace.distributed_decode.default" in name for name in names) != 1:
        wrong.append(f"nodes {names}")
    compiled = torch.compile(decoding, fullgraph=True, backend="aot_eager")
    for name, call in (("graph", graph), ("compiled", compiled), ("eager", decoding)):
        if not torch.equal(call(*own), right):
            wrong.append(name)
    try:
        decoding(own[0].requires_grad_(), *own[1:]).sum().backward()
        wrong.append("a gradient")
    except RuntimeError as error:
        if "has no gradients" not in str(error):
            wrong.append(str(error))
    return wrong


def decoded() -> bool:
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 21, 2, 16), torch.randn(2, 21, 2, 16)
    mine = [each.chunk(world_size, 1)[rank] for each in (k, v)]
    by = [interlace.distributed_decode(q, mine, algorithm=how) for how in ("fused", "unfused")]  # type: ignore[call-overload]
    whole = [each.transpose(1, 2) for each in (q.unsqueeze(1), k, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*whole, enable_gqa=True).squeeze(2)
    return all(bool((each - right).abs().max() < 1e-5) for each in by)
