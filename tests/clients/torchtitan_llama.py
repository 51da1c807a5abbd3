"""torchtitan: its Llama 3 debug model, parallelized by its own functions: tensor parallel and FSDP2."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torchtitan.tools.utils

PACKAGES = ("torchtitan",)
TRAINS = (
    "its Llama 3 debug model by its `parallelize` functions: tensor and sequence parallel, FSDP2"
)
TOLD = '`init_process_group("interlace")` before its `Trainer`'


def train(backend: str, step: Callable[[object], None]) -> None:
    # Without a GPU it takes the name of CUDA for its meshes; files that are imported next keep it.
    torchtitan.tools.utils.device_type = "cpu"
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    dist.init_process_group(backend)
    config = llama3_debugmodel()
    spec = config.model_spec
    for layer in spec.model.layers:  # flex attention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.mixed_precision_param = "float32"
    config.training.seq_len = 64
    config.parallelism.tensor_parallel_degree = 2
    # its other backend shards plain tensors by FSDP, which torch 2.13 does not
    config.parallelism.spmd_backend = "partial_dtensor"
    distributed.set_spmd_backend(config.parallelism.spmd_backend)
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    loss_function = config.loss.build(compile_config=config.compile)
    loss_function.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    optimizers = config.optimizer.build(model_parts=[model])
    context = distributed.get_spmd_context(parallel_dims=dims)
    torch.manual_seed(dims.get_mesh("fsdp").get_local_rank())
    tokens = torch.randint(spec.model.vocab_size, (2, config.training.seq_len))
    positions = torch.arange(config.training.seq_len).expand(2, -1)
    for _ in range(20):
        with context():
            loss, _ = loss_function(model(tokens, positions=positions), tokens, tokens.numel())
            loss.backward()
        distributed.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        optimizers.zero_grad()
        step(loss)
