"""Hugging Face transformers: a random Llama, made of a configuration, split over ranks by its own plan."""

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

PACKAGES = ("transformers",)
TRAINS = 'a Llama, `tp_plan="auto"`'
TOLD = '`init_process_group("interlace")` before `from_pretrained`'


def train(backend: str, step: Callable[[object], None]) -> None:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)  # by every rank, as there is no group yet
        dist.init_process_group(backend)
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(config.vocab_size, (4, 64))
    for _ in range(20):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step(loss)
