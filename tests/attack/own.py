"""Training script of a user: own layers, a data loader with a worker, checkpoints, and snapshots of ds_ext."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_ext.launch import process

WIDTH, LAYERS = 8, 8


def main() -> None:
    """Train; with ``--load`` and after a restart from the folder of ``--save``, if it has a checkpoint."""
    parser = argparse.ArgumentParser()
    for flag in ("--deepspeed_config", "--save", "--load", "--metrics-file", "--local_rank"):
        parser.add_argument(flag)
    for flag in ("--save-interval", "--train-iters", "--eval-interval", "--eval-iters", "--seed"):
        parser.add_argument(flag, type=int)
    args = parser.parse_args()
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    import ds_ext
    from ds_ext.engine.recovery.recovery import agreed_restart_count
    from ds_ext.recipes.training.loop import say, shut_down

    class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
        def __init__(self, first: int) -> None:
            self.first = first

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(self.first + index + 1000 * args.seed)
            sample = torch.randn(WIDTH, generator=generator)
            return sample, sample.roll(1)

    class Batches:
        """Micro-batches of two samples."""

        def __init__(self) -> None:
            self.start, self.loader = 0, None

        loader: Iterator[Any] | None

        def get(self, micro_batch: int) -> Any:
            if self.loader is None:
                samples = Samples(2 * self.start)
                self.loader = iter(DataLoader(samples, 2, num_workers=1, multiprocessing_context="fork"))
                self.pulled: list[Any] = []
            while len(self.pulled) <= micro_batch:
                self.pulled.append(next(self.loader))
            return self.pulled[micro_batch]

        def advance(self, micro_batches: int) -> None:
            self.start += micro_batches
            if self.loader is not None:
                self.get(micro_batches - 1)
                self.pulled.clear()

        def state_dict(self) -> dict[str, Any]:
            return {"start": self.start}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.start, self.loader = state["start"], None

    class Layer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            torch.manual_seed(number + 100 * args.seed)
            self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input + self.dropout(torch.tanh(self.linear(input)))

    process.set_up_logging()
    ds_ext.init_distributed()
    config = json.loads(Path(args.deepspeed_config).read_text())
    config["ds_ext"].pop("train")
    model = ds_ext.PipelineModule([Layer(n) for n in range(LAYERS)], config, loss_fn=nn.MSELoss())
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches, evaluated = Batches(), Batches()
    engine.set_dataiterator(batches)
    # A new host has not restarted its ranks, so the ranks ask together.
    restarted = agreed_restart_count() > 0
    if engine.recover(batches) is None and (args.load or restarted):
        path, _ = engine.load_checkpoint(args.save)
        if path is not None:
            say(f"resumed from {path} at step {engine.global_steps}")
    engine.try_checkpoint_folder(args.save)
    metrics = ds_ext.Metrics(engine, total_steps=args.train_iters, file=args.metrics_file, log_interval=1)
    while engine.global_steps < args.train_iters:
        metrics.log(engine.train_batch(batches))
        step = engine.global_steps
        if step % args.eval_interval == 0:
            evaluated.load_state_dict({"start": 0})
            engine.eval_batch(evaluated)
        if step % args.save_interval == 0 or step == args.train_iters:
            engine.save_checkpoint(args.save, f"step_{step}")
            say(f"step {step}: saved {Path(args.save) / f'step_{step}'}")
    shut_down(engine)


if __name__ == "__main__":
    process.run(main)
