"""A training script whose ranks are on several hosts: far.py PIPELINE_PARALLEL_SIZE TRANSPORT WIDTH [REST_S].

Each layer is WIDTH wide, so a message has 8 * WIDTH bytes. Rank 0 rests REST_S seconds in every step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from ds_ext.launch import process


def main() -> None:
    pipeline, transport, width = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rest_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    import torch
    from torch import nn

    import ds_ext
    from ds_ext.engine import init_distributed
    from ds_ext.recipes.training.loop import say

    class Scale(nn.Module):
        """One weight for each feature: wide messages, little work."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input * self.weight

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.ones(2, width), torch.zeros(2, width)

    process.set_up_logging()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": pipeline,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "ds_ext": {"pipeline_parallel_size": pipeline, "transport": transport},
    }
    init_distributed(60)
    model = ds_ext.PipelineModule(
        [Scale() for _ in range(pipeline)], config, loss_fn=nn.MSELoss(), partition_method="uniform"
    )
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = batches()
    step = 0
    while True:
        if process.rank() == 0:
            time.sleep(rest_s)
        engine.train_batch(data)
        step += 1
        say(f"step {step} done")


if __name__ == "__main__":
    process.run(main)
