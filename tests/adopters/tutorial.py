"""Script in the shape of DeepSpeedExamples/training/pipeline_parallelism: a vision model as a list of modules.

``training_data`` goes to initialize(), and train_batch() takes no arguments.
"""

import argparse

import deepspeed
import torch
from deepspeed import initialize
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.utils import set_random_seed
from torch import nn


def vision_model() -> nn.Module:
    model = nn.Module()
    convolutions = [part for _ in range(5) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))]
    model.features = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), *convolutions
    )
    model.avgpool = nn.AdaptiveAvgPool2d(2)
    model.classifier = nn.Sequential(
        nn.Dropout(0.0), nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 10)
    )
    return model


def join_layers(model):
    return [*model.features, model.avgpool, lambda x: torch.flatten(x, 1), *model.classifier]


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pipeline-parallel-size", type=int, default=4)
    return deepspeed.add_config_arguments(parser).parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(1138)
    set_random_seed(1138)
    net = PipelineModule(
        layers=join_layers(vision_model()),
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method="parameters",
        activation_checkpoint_interval=0,
    )
    images = torch.randn(64, 3, 8, 8)
    trainset = torch.utils.data.TensorDataset(images, torch.arange(64) % 10)
    engine, _, _, _ = initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=trainset,
    )
    losses = [float(engine.train_batch()) for _ in range(args.steps)]
    return {"losses": losses, "steps": engine.global_steps, "lr": engine.get_lr()}
