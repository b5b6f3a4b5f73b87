r"""Kill a rank while it trains: the ranks restart, and continue with the step that it was killed in.

torchrun --nproc_per_node 4 --max-restarts 1 examples/recovery/killed.py \
    --deepspeed_config examples/recovery/killed.json
"""

import os
import signal
import threading

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_ext
from ds_ext.launch import process

STEPS, WIDTH = 20, 64
KILLED_RANK, KILLED_STEP = 2, 11


def main() -> None:
    """Train, with a kill at the first start."""
    ds_ext.init_distributed()
    samples = torch.rand(4096, WIDTH, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(samples, samples.flip(1))
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(16)]
    model = ds_ext.PipelineModule(layers, loss_fn=nn.functional.mse_loss)  # reads --deepspeed_config
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), training_data=data)
    metrics = ds_ext.Metrics(engine, total_steps=STEPS, file="metrics.jsonl")
    recovered = engine.recover()  # None at the first start
    while engine.global_steps < STEPS:
        if recovered is None and (engine.global_rank, engine.global_steps + 1) == (KILLED_RANK, KILLED_STEP):
            threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGKILL)).start()
        metrics.log(engine.train_batch())


if __name__ == "__main__":
    process.run(main)
