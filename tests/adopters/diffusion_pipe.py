"""Script in the shape of diffusion-pipe: manual partition, recomputation, and an optimizer made after initialize().

It also replaces a handler in _INSTRUCTION_MAP, changes shapes between steps, and reads the grid.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import initialize
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ReduceGrads
from torch import nn
from torch.utils.checkpoint import checkpoint

MICRO_BATCHES = 8  # per step, over all data-parallel ranks


class ManualPipelineModule(PipelineModule):
    def __init__(self, *args, manual_partition_split=(), **kwargs):
        self.manual_partition_split = manual_partition_split
        super().__init__(*args, **kwargs)

    def _partition_layers(self, method="uniform"):
        if method != "manual":
            super()._partition_layers(method)
            return
        assert len(self.manual_partition_split) == self.num_stages - 1
        self.parts = [0, *self.manual_partition_split, len(self._layer_specs)]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


class Entry(nn.Linear):
    def forward(self, input) -> Any:
        latents_BTD, time_B = input
        return super().forward(latents_BTD) + time_B[:, None, None], time_B


class Block(nn.Linear):
    def forward(self, input) -> Any:
        hidden_BTD, time_B = input
        return hidden_BTD + torch.tanh(super().forward(hidden_BTD)) * time_B[:, None, None], time_B


class Exit(nn.Linear):
    def forward(self, input) -> Any:
        return super().forward(input[0])


def loss_fn(output_BTD, label):
    target_BTD, mask_BT1 = label
    return ((output_BTD - target_BTD).square() * mask_BT1).mean()


def micro_batch(step, number):
    generator = torch.Generator().manual_seed(100 * step + number)
    length = 3 + step  # every micro-batch of a step has this length
    latents_BTD = torch.randn(2, length, 8, generator=generator)
    time_B, mask_BT1 = torch.rand(2, generator=generator), torch.ones(2, length, 1)
    return (latents_BTD, time_B), (latents_BTD.roll(1, 1), mask_BT1)


def iterator_for_step(engine, step, count):
    """All micro-batches of this data-parallel rank, read before the step; None on ranks that load nothing."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    first = engine.grid.get_data_parallel_rank() * count
    return iter([micro_batch(step, first + number) for number in range(count)])


def main(config, splits, reentrant):
    torch.manual_seed(0)
    layers = [Entry(8, 8), *(Block(8, 8) for _ in range(8)), Exit(8, 8)]
    model = ManualPipelineModule(
        layers=layers,
        num_stages=4,
        partition_method="manual",
        manual_partition_split=splits,
        loss_fn=loss_fn,
        dynamic_shape=True,
        activation_checkpoint_interval=1,
        checkpointable_layers=["Block"],
        activation_checkpoint_func=partial(checkpoint, use_reentrant=reentrant),
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, _, _, _ = initialize(model=model, config=config)
    engine._support_torch_style_backward = True
    ranks = engine.grid.get_data_parallel_world_size()
    assert engine.gradient_accumulation_steps() * ranks == MICRO_BATCHES
    assert engine.train_micro_batch_size_per_gpu() == 2 and engine.is_pipe_parallel

    def get_optimizer(parameters):
        return torch.optim.AdamW([{"params": parameters, "weight_decay": 0.1}], lr=0.01)

    engine._configure_optimizer(get_optimizer, parameters)
    engine.communication_data_type = torch.float32
    engine.lr_scheduler = torch.optim.lr_scheduler.LinearLR(engine.optimizer, 1.0, 0.5, total_iters=4)
    reductions, original = [], PipelineEngine._INSTRUCTION_MAP[ReduceGrads]

    def _exec_reduce_grads(self):
        reductions.append(self.mpu.get_data_parallel_world_size())
        original(self)

    PipelineEngine._INSTRUCTION_MAP[ReduceGrads] = _exec_reduce_grads
    losses, evaluated = [], []
    try:
        for step in range(3):
            engine.reset_activation_shape()
            iterator = iterator_for_step(engine, step, engine.micro_batches)
            losses.append(engine.train_batch(iterator).item())
            engine.reset_activation_shape()
            count = engine.micro_batches // 2
            iterator = iterator_for_step(engine, step + 5, count)
            evaluated.append(engine.eval_batch(iterator, num_micro_batches=count).item())
    finally:
        PipelineEngine._INSTRUCTION_MAP[ReduceGrads] = original
    assert reductions == [ranks] * 3
    own = {}
    if engine.grid.get_data_parallel_rank() == 0:
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
    saved: list = [None] * dist.get_world_size()
    dist.all_gather_object(saved, own)
    merged = {name: p for part in saved for name, p in part.items()}
    return {
        "losses": losses,
        "evaluated": evaluated,
        "lr": engine.get_lr(),
        "names": sorted(merged),
        "sum": float(sum(p.double().abs().sum() for p in merged.values())),
    }
