"""A training script of a user that writes to a full disk: disk.py save|trace FOLDER."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_ext.launch import process


def main() -> None:
    what, folder = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    import torch
    from torch import nn

    import ds_ext
    from ds_ext.engine import init_distributed
    from ds_ext.recipes.training.loop import say

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.ones(2, 4), torch.zeros(2, 4)

    process.set_up_logging()
    ranks = process.world_size()
    section: dict[str, Any] = {"pipeline_parallel_size": ranks}
    if what == "trace":
        section["trace"] = {"dir": str(Path(folder) / "traces")}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ranks,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "ds_ext": section,
    }
    init_distributed(60)
    layers = [nn.Linear(4, 4) for _ in range(ranks)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.MSELoss(), partition_method="uniform")
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = batches()
    engine.train_batch(data)
    say("step 1 done")
    engine.save_checkpoint(folder)


if __name__ == "__main__":
    process.run(main)
