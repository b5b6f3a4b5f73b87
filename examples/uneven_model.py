"""Divide layers of unequal cost into stages by measured times.

    torchrun --nproc_per_node 4 examples/uneven_model.py --deepspeed_config examples/own_model.json

The default, partition_method="parameters", balances parameters. Here each block repeats its weights a different number
of times, so parameters say nothing about its time.
"""

import time

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import partition_balanced
from torch import nn

import ds_ext
from ds_ext.launch import process

WIDTH, REPEATS, STEPS = 256, (1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8), 20
STAGES = 8  # bitpipe: two per device


class Repeated(nn.Module):
    """Block that applies its weights several times: (batch, width) to (batch, width)."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats = repeats
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Apply the weights ``repeats`` times to ``hidden_BD``."""
        for _ in range(self.repeats):
            hidden_BD = hidden_BD + torch.tanh(self.linear(self.norm(hidden_BD)))
        return hidden_BD


def seconds(layer: ds_ext.LayerSpec) -> float:
    """Return the shortest of several forwards and backwards of one micro-batch."""
    module, times = layer.build(), []
    for _ in range(5):
        begin = time.perf_counter()
        module(torch.randn(8, WIDTH)).sum().backward()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Measure the layers, divide them and train."""
    ds_ext.init_distributed()
    layers = [ds_ext.LayerSpec(Repeated, repeats) for repeats in REPEATS]
    # Ranks measure different times, so all of them use those of rank 0.
    measured = [[seconds(layer) for layer in layers] if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(measured)
    boundaries = partition_balanced(measured[0], STAGES)
    model = ds_ext.PipelineModule(layers, loss_fn=nn.functional.mse_loss, partition_method=boundaries)
    inputs = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs.roll(1, dims=1))
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), training_data=data)
    metrics = ds_ext.Metrics(engine, total_steps=STEPS)
    for _ in range(STEPS):
        metrics.log(engine.train_batch())
    metrics.print_summary()


if __name__ == "__main__":
    process.run(main)
