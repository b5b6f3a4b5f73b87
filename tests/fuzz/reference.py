"""Training loop of a job in one process, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn

from ds_ext.tensor_parallel import TensorParallel, keyed_rng

from .data import EVALUATION, ordered_batch, step_batches
from .job import JSON_SCHEDULER, KEYED_RANDOM, OPTIMIZERS, Job
from .zoo import ENDS

LAYER_SEED = 1234  # DeepSpeed's base seed
FP32_NOISE = 2.0**-22
BF16_NOISE = 2.0**-8


@dataclass
class Result:
    """Results of a training run.

    Attributes:
        losses: mean over the micro-batches of each step.
        norms: norm of the gradient of each step, before clipping; None: not measured.
        evaluations: losses of the evaluations.
        state: parameters and persistent buffers by "layer.name".
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


class Model:
    """Layers of a job, applied one after the other."""

    def __init__(self, job: Job) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.calls: list[Callable[[Any], Any]] = []
        ties: dict[str, nn.Module] = {}
        torch.manual_seed(job.seed)
        with job.built():
            for index, spec in enumerate(job.layers(TensorParallel())):
                torch.manual_seed(LAYER_SEED + index)
                if isinstance(spec, TiedLayerSpec):
                    module = ties[spec.key] = ties.get(spec.key) or spec.build()
                else:
                    module = spec.build() if isinstance(spec, LayerSpec) else spec
                if isinstance(module, nn.Module):
                    self.modules[index] = module
                function = getattr(spec, "forward_fn", None)
                self.calls.append(module if function is None else _Bound(function, module))
        end = ENDS[job.end]
        self.loss = (end.plain_loss or end.loss)()
        for module in self.modules.values():
            if job.bf16:  # DeepSpeed leaves buffers in fp32
                for p in module.parameters():
                    p.data = p.data.bfloat16()
            module.train()

    @property
    def buffers(self) -> dict[tuple[nn.Module, str], Tensor]:
        """Buffers by (module, name)."""
        owners = [owner for module in self.modules.values() for owner in module.modules()]
        return {
            (owner, name): buffer for owner in owners for name, buffer in owner.named_buffers(recurse=False)
        }

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters, each once."""
        return list(
            {
                id(p): p for module in self.modules.values() for p in module.parameters() if p.requires_grad
            }.values()
        )

    def halve(self) -> None:
        """Halve weights and floating-point buffers."""
        states = {index: halved(module.state_dict()) for index, module in self.modules.items()}
        for index, module in self.modules.items():
            module.load_state_dict(states[index])

    def state(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by "layer.name"."""
        return {
            f"{index}.{name}": value.detach().clone()
            for index, module in self.modules.items()
            for name, value in module.state_dict().items()
        }

    def loss_of(
        self, batch: tuple[Any, Any], context: Callable[[int], Any] = lambda layer: nullcontext()
    ) -> Any:
        """Return what the loss function returns for a micro-batch.

        Args:
            context: function of the layer's index that returns the context of its forward.
        """
        x, labels = batch
        for index, call in enumerate(self.calls):
            with context(index):
                x = call(x)
        return x if self.loss is None else self.loss(x, labels)


class Replicas:
    """Buffers of the replicas of a model, each of which trains other micro-batches."""

    def __init__(self, model: Model, count: int) -> None:
        self.model, self.count, self.current = model, count, 0
        self.buffers = [{slot: b.clone() for slot, b in model.buffers.items()} for _ in range(count)]

    def use(self, replica: int) -> None:
        """Give the model the buffers of a replica."""
        self.buffers[self.current], self.current = self.model.buffers, replica
        for (owner, name), buffer in self.buffers[replica].items():
            setattr(owner, name, buffer)

    def average(self) -> None:
        """Give all replicas the mean of their buffers; those of the first one if they are no floats."""
        self.use(0)
        for slot, first in self.buffers[0].items():
            of_replicas = torch.stack([buffers[slot] for buffers in self.buffers])
            mean = of_replicas.double().mean(0) if first.is_floating_point() else first
            for buffers in self.buffers:
                buffers[slot].copy_(mean)


class _Bound:
    """Function of a tied module."""

    def __init__(self, function: Callable[[nn.Module, Any], Any], module: nn.Module) -> None:
        self.function, self.module = function, module

    def __call__(self, x: Any) -> Any:
        return self.function(self.module, x)


def halved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state whose floating-point tensors are halved, as weights that a script sets."""
    return {k: v / 2 if v.is_floating_point() or v.is_complex() else v for k, v in state.items()}


@torch.no_grad()
def halve(module: nn.Module) -> None:
    """Halve a module's state: assign new tensors to ``parameter.data``, and change buffers in place."""
    state = {id(value): value for value in module.state_dict(keep_vars=True).values()}
    for value in state.values():
        if isinstance(value, nn.Parameter):
            value.data = value.data / 2
        elif value.is_floating_point() or value.is_complex():
            value /= 2


def make_optimizer(job: Job, parameters: list[nn.Parameter], part: int = 0) -> torch.optim.Optimizer:
    """Return torch's optimizer of a job's first or second layout."""
    name, options = OPTIMIZERS[job.optimizer]["type"], dict(OPTIMIZERS[job.optimizer]["params"])
    options["lr"] = job.rate(part)
    options.pop("torch_adam", None)
    options.pop("adam_w_mode", None)
    return getattr(torch.optim, name)(parameter_groups(job, parameters), **options)


def parameter_groups(job: Job, parameters: list[nn.Parameter]) -> list[Any]:
    """Return the parameters, in two groups if biases have no weight decay."""
    if not job.decay_groups:
        return parameters
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler that changes the learning rate after every step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def _make_json_scheduler(job: Job, optimizer: torch.optim.Optimizer, part: int) -> Any:
    return getattr(lr_schedules, JSON_SCHEDULER)(optimizer, **job.scheduler_params(part))


def train(job: Job, noise_seed: int | None = None) -> Result:
    """Train a job in one process.

    Args:
        noise_seed: seed of rounding errors that are added to the first weights, so that gradients of rounding errors
            only change, and to all gradients; None: no errors. The difference of two results shows how sensitive the
            job is to the order of sums.
    """
    model, result = Model(job), Result()
    noise = None if noise_seed is None else torch.Generator().manual_seed(noise_seed)
    if job.set_weights in ("load", "assign"):
        model.halve()
    parameters = model.parameters
    if noise is not None and not job.bf16:
        _add_noise([p.detach() for p in parameters], noise, FP32_NOISE)
    masters = [nn.Parameter(p.detach().float()) for p in parameters] if job.bf16 else parameters
    optimizer = make_optimizer(job, masters)
    scheduler: Any = None
    if job.scheduler:
        scheduler = (
            make_scheduler(optimizer)
            if job.scheduler == "script"
            else _make_json_scheduler(job, optimizer, 0)
        )
    replicas = Replicas(model, job.layout.pipes)
    _evaluate(job, 0, replicas, result)
    for step in range(job.steps):
        if job.resume is not None and step == job.resume_after:
            replicas.average()
            if job.scheduler == "json":
                scheduler = _make_json_scheduler(job, optimizer, 1)
                scheduler.step(step - 1)
            if job.set_weights == "save":
                model.halve()
                _copy(parameters, masters)
            replicas = Replicas(model, job.resume.pipes)
        loss, grads = _gradients(job, replicas, parameters, step)
        if noise is not None:
            # A bf16 layer rounds gradients by the scale of the loss, and outputs by the strides of its inputs, both of
            # which differ in a pipeline. Adam makes a large step of that where a gradient plus its decay is near zero.
            _add_noise(grads, noise, BF16_NOISE if job.rounds else FP32_NOISE)
        for master, grad in zip(masters, grads, strict=True):
            if grad is None and (job.zero or job.bf16):
                grad = torch.zeros_like(master)
            master.grad = grad
        limit = job.clip or float("inf")
        result.losses.append(0.0 if loss is None else loss)
        result.norms.append(float(nn.utils.clip_grad_norm_(masters, limit)))
        if loss is not None:
            optimizer.step()
        optimizer.zero_grad()
        _copy(masters, parameters)
        if scheduler is not None:
            scheduler.step()
        _evaluate(job, step + 1, replicas, result)
    replicas.average()
    result.state = model.state()
    return result


@torch.no_grad()
def _copy(sources: list[nn.Parameter], targets: list[nn.Parameter]) -> None:
    """Copy parameters to others, which may be the same."""
    for source, target in zip(sources, targets, strict=True):
        if source is not target:
            target.copy_(source)


def _gradients(
    job: Job, replicas: Replicas, parameters: list[nn.Parameter], step: int
) -> tuple[float | None, list[Tensor | None]]:
    """Return the loss of a step, and its gradients in fp32; None for unused parameters.

    The loss is None if no label is counted. Such a step changes no weight.
    """
    sums: list[Tensor | None] = [None] * len(parameters)
    total, count, pairs = 0.0, 0.0, ENDS[job.end].pairs
    for number, batch in enumerate(step_batches(job, step)):
        replicas.use(number * replicas.count // job.micro_batches)
        loss = replicas.model.loss_of(batch, partial(_random_numbers, job, step, number))
        # Means are divided before the backward, because bf16 gradients are rounded in it.
        loss, weight = loss if pairs else (loss / job.micro_batches, 0)
        loss.backward()
        total, count = total + float(loss), count + float(weight)
        for index, p in enumerate(parameters):
            if p.grad is not None:
                grad = p.grad.float() if job.bf16 else p.grad
                before = sums[index]
                sums[index] = grad if before is None else before + grad
                p.grad = None
    if pairs and not count:
        return None, sums
    count = count or 1.0
    return total / count, [None if grad is None else grad / count for grad in sums]


def _random_numbers(job: Job, step: int, micro_batch: int, layer: int) -> AbstractContextManager[Any]:
    """Return the context in which a layer draws its random numbers."""
    if not KEYED_RANDOM:
        return nullcontext()
    from ds_ext.tensor_parallel import layer_key  # pyright: ignore[reportAttributeAccessIssue]

    return keyed_rng(layer_key(job.seed, step, micro_batch, layer), torch.device("cpu"))


def _add_noise(tensors: Sequence[Tensor | None], noise: torch.Generator, size: float) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            tensor += (
                size * tensor.abs().max() * torch.randn(tensor.shape, generator=noise, dtype=tensor.dtype)
            )


def _evaluate(job: Job, step: int, replicas: Replicas, result: Result) -> None:
    """Evaluate if the job does so after this number of steps."""
    if job.evaluate_after != step:
        return
    replicas.average()
    model = replicas.model
    modes = [(module, module.training) for outer in model.modules.values() for module in outer.modules()]
    for module in model.modules.values():
        module.eval()
    total, count = 0.0, 0.0
    with torch.no_grad():
        for number in range(job.micro_batches):
            loss = model.loss_of(ordered_batch(job, 0, number, EVALUATION))
            loss, weight = loss if ENDS[job.end].pairs else (loss, 1)
            total, count = total + float(loss), count + float(weight)
    for module, training in modes:
        module.training = training
    result.evaluations.append(total / (count or 1.0))
