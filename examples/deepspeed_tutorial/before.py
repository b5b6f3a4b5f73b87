"""Image classifier in DeepSpeed's pipeline, in the shape of DeepSpeed's tutorial on pipeline parallelism.

deepspeed --num_gpus 4 before.py --deepspeed_config before.json
deepspeed --num_gpus 4 after.py --deepspeed_config after.json
"""

import argparse

import deepspeed
import torch
from deepspeed import initialize
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.utils import set_random_seed
from torch import nn


def network() -> list:
    """Return the layers of a small AlexNet."""
    convolutions = [
        part for _ in range(6) for part in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace=True))
    ]
    return [
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *convolutions,
        nn.AdaptiveAvgPool2d(2),
        lambda images: torch.flatten(images, 1),
        *(nn.Dropout(0.0), nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 10)),
    ]


def images() -> torch.utils.data.Dataset:
    """Return random images whose brightest corner is their class; replace them by your dataset."""
    pixels = torch.rand(512, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    classes = torch.arange(512) % 4
    for image, corner in zip(pixels, classes.tolist(), strict=True):
        row, column = 8 * (corner // 2), 8 * (corner % 2)
        image[:, row : row + 8, column : column + 8] += 1
    return torch.utils.data.TensorDataset(pixels, classes)


def main() -> None:
    """Train, and print the last loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=30)
    args = deepspeed.add_config_arguments(parser).parse_args()

    deepspeed.init_distributed()
    set_random_seed(1138)
    net = PipelineModule(layers=network(), loss_fn=nn.CrossEntropyLoss(), num_stages=4)
    engine, *_ = initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=images(),
    )
    for _ in range(args.steps):
        loss = engine.train_batch()
    if engine.global_rank == 0:
        print(f"loss {float(loss):.6f}", flush=True)


if __name__ == "__main__":
    main()
