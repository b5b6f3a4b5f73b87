"""Script in the shape of qlora-pipe: frozen layers with trained adapters, and a loader of the script's own.

The loader is set once. Evaluation changes engine.micro_batches. Checkpoints omit the frozen weights.
"""

import deepspeed
import torch
from deepspeed import initialize
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

MICRO_BATCHES = 8  # per step, over all data-parallel ranks


class Adapted(nn.Module):
    """Frozen linear layer with a trained low-rank adapter."""

    def __init__(self, number, size):
        super().__init__()
        torch.manual_seed(number)
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, hidden):
        return hidden + torch.tanh(self.base(hidden) + self.lora_B(self.lora_A(hidden)))


class Loader:
    """Endless micro-batches of one data-parallel rank, with the number of its epoch."""

    def __init__(self, rank, count, seed=0):
        self.rank, self.count, self.seed, self.pulled = rank, count, seed, 0

    def __iter__(self):
        while True:
            step, index = divmod(self.pulled, self.count)
            number = step * MICRO_BATCHES + self.rank * self.count + index
            generator = torch.Generator().manual_seed(1000 * self.seed + number)
            inputs = torch.randn(2, 8, generator=generator)
            self.pulled += 1
            yield inputs, inputs.sin()


def evaluate(engine, count):
    before, engine.micro_batches = engine.micro_batches, count
    loader = Loader(engine.grid.get_data_parallel_rank(), count, seed=1)
    loss = engine.eval_batch(iter(loader)).item()
    engine.micro_batches = before
    return loss


def build(config):
    specs = [LayerSpec(Adapted, number, 8) for number in range(8)]
    model = PipelineModule(
        layers=specs,
        num_stages=4,
        loss_fn=nn.functional.mse_loss,
        activation_checkpoint_interval=1,
        activation_checkpoint_func=deepspeed.checkpointing.checkpoint,
        partition_method="parameters",
        dynamic_shape=True,
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, optimizer, _, _ = initialize(
        model=model,
        config=config,
        model_parameters=parameters,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    )
    loader = Loader(engine.grid.get_data_parallel_rank(), engine.gradient_accumulation_steps())
    engine.set_dataloader(loader)
    engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return engine


def main(config, folder):
    engine = build(config)
    losses = [engine.train_batch().item() for _ in range(2)]
    evaluated = evaluate(engine, engine.micro_batches // 2)
    engine.save_checkpoint(folder, client_state={"step": 2}, save_latest=True, exclude_frozen_parameters=True)
    losses.append(engine.train_batch().item())
    _, state = engine.load_checkpoint(folder, load_module_strict=False, load_lr_scheduler_states=True)
    again = evaluate(engine, engine.micro_batches // 2)
    frozen = [name for name, p in engine.module.named_parameters() if not p.requires_grad]
    return {
        "losses": losses,
        "evaluated": [evaluated, again],
        "step": state["step"],
        "frozen": len(frozen) > 0,
        "steps": engine.global_steps,
    }
