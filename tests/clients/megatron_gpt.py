"""Megatron-core: a GPT with tensor and sequence parallelism, gradients finished by Megatron itself."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

PACKAGES = ("megatron-core",)
TRAINS = "a GPT, tensor and sequence parallel"
TOLD = '`init_process_group("interlace")` before `initialize_model_parallel`'


class Norm(torch.nn.LayerNorm):
    """Without APEX and Transformer Engine, Megatron has no norm for sequence shards."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = True


def configuration() -> TransformerConfig:
    # Megatron assumes these, and a machine without a GPU lacks them
    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def build(config: TransformerConfig) -> GPTModel:
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = TransformerBlockSubmodules(layer_specs=[layer] * 2, layer_norm=Norm)
    return GPTModel(config, layers, vocab_size=128, max_sequence_length=64)


def train(backend: str, step: Callable[[object], None]) -> None:
    dist.init_process_group(backend)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = configuration()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), build(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(parallel_state.get_data_parallel_rank())
    tokens = torch.randint(128, (4, 64))
    positions = torch.arange(64).expand(4, 64)
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).triu(1)
    for _ in range(20):
        model.zero_grad_buffer()
        loss = model(tokens, positions, mask, labels=tokens).mean()
        loss.backward()
        finalize_model_grads([model])
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        step(loss)
