"""torchtitan: its Trainer trains its Llama 3 debug model; another goes on from its checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as tools

PACKAGES = ("torchtitan",)
TRAINS = (
    "its Llama 3 debug model by its `Trainer`: tensor and sequence parallel, FSDP2; a second `Trainer` "
    "goes on from the checkpoint of the first"
)
TOLD = '`init_process_group("interlace")` before its `Trainer`'


def without_gpu() -> None:
    """Without a GPU torchtitan still takes CUDA for its device; later imports keep this setting."""
    tools.device_type = "cpu"
    tools.device_module = SimpleNamespace(
        **{**vars(torch.cpu), "current_device": lambda: 0},
        get_device_name=lambda _: "CPU",
        get_device_properties=lambda _: SimpleNamespace(total_memory=1 << 30),
        memory_stats=lambda _: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )


def configuration() -> Any:
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    class Tokens(BaseDataLoader):
        """The same random tokens for every step."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, dp_rank: int, seq_len: int, **_: Any) -> None:
            generator = torch.Generator().manual_seed(dp_rank)
            self.tokens = torch.randint(2048, (2, seq_len), generator=generator)

        def __iter__(self) -> Any:
            positions = torch.arange(self.tokens.shape[1]).expand(2, -1)
            while True:
                yield {"input": self.tokens, "positions": positions}, self.tokens

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **_: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = None

    config = llama3_debugmodel()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Tokens.Config()
    for layer in config.model_spec.model.layers:  # flex attention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.training.seq_len, config.training.local_batch_size = 64, 2
    config.parallelism.tensor_parallel_degree = 2
    # its other backend shards plain tensors by FSDP, which torch 2.13 does not
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable, config.debug.seed = True, 0
    return config


def train(backend: str, step: Callable[[object], None]) -> None:
    without_gpu()
    from torchtitan.trainer import Trainer

    dist.init_process_group(backend)
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # as torch 2.13 names it
    config = configuration()
    for config.training.steps in (10, 20):
        trainer = Trainer(config)
        trainer.metrics_processor.log = lambda number, loss, *_, **__: step(torch.tensor(loss))
        trainer.train()
        trainer.close()
