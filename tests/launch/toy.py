"""A training script of a user: own layers in a ds_ext.PipelineModule, run by ds_ext.launch.process.

toy.py STEPS TIMEOUT_S [FAILING_RANK FAILING_STEP]

The environment variable TOY_PRECISION names a section of the JSON to enable, such as fp16.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from ds_ext.launch import process

WIDTH = 4
EVERY = -2  # as a failing rank: all of them, as soon as they have met


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    steps, timeout_s = int(words[0]), float(words[1])
    failing_rank, failing_step = (int(word) for word in words[2:] or ("-1", "0"))
    import torch
    from torch import nn

    import ds_ext
    from ds_ext.engine import init_distributed
    from ds_ext.recipes.training.loop import say, shut_down

    class Faulty(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if process.rank() == failing_rank and engine.global_steps == failing_step:
                raise ValueError("the layer is at fault")
            return super().forward(input)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.ones(2, WIDTH), torch.zeros(2, WIDTH)

    process.set_up_logging()
    ranks = process.world_size()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ranks,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "ds_ext": {"pipeline_parallel_size": ranks, "transport_options": {"timeout_s": timeout_s}},
    }
    if "TOY_PRECISION" in os.environ:
        config[os.environ["TOY_PRECISION"]] = {"enabled": True}
    # Starting takes longer than the limit that some tests set for messages.
    init_distributed(60)
    if failing_rank == EVERY:
        raise ValueError("all are at fault")
    layers = [Faulty(WIDTH, WIDTH) for _ in range(ranks)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.MSELoss(), partition_method="uniform")
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = batches()
    for step in range(steps):
        engine.train_batch(data)
        say(f"step {step + 1} done")
    shut_down(engine)


if __name__ == "__main__":
    process.run(main)
