"""Train layers of your own with any schedule.

torchrun --nproc_per_node 4 examples/own_model.py --deepspeed_config examples/own_model.json
deepspeed --num_gpus 4 examples/own_model.py --deepspeed_config examples/own_model.json
"""

import torch
from torch import nn

import ds_ext
from ds_ext.launch import process

STEPS = 40


class Block(nn.Module):
    """Residual block: (batch, width) to (batch, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Add the inner layers to ``hidden_BD``."""
        return hidden_BD + self.inner(hidden_BD)


def main() -> None:
    """Fit sin(xy)."""
    ds_ext.init_distributed()
    points = torch.rand(4096, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
    data = torch.utils.data.TensorDataset(points, torch.sin(points[:, :1] * points[:, 1:]))
    blocks = [ds_ext.LayerSpec(Block, 64) for _ in range(14)]
    layers = [ds_ext.LayerSpec(nn.Linear, 2, 64), *blocks, ds_ext.LayerSpec(nn.Linear, 64, 1)]
    model = ds_ext.PipelineModule(layers, loss_fn=nn.functional.mse_loss)  # reads --deepspeed_config
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), training_data=data)
    metrics = ds_ext.Metrics(engine, total_steps=STEPS)
    for _ in range(STEPS):
        metrics.log(engine.train_batch())
    metrics.print_summary()


if __name__ == "__main__":
    process.run(main)
