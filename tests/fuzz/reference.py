"""Training loop of a job in one process, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from ds_ext.tensor_parallel import TensorParallel, keyed_rng

from .actions import Evaluate
from .data import EVALUATION, evaluation_batches, ordered_batch, step_batches
from .job import JSON_SCHEDULER, KEYED_RANDOM, LOSS_SCALE, OPTIMIZERS, PRECISIONS, Job
from .scripts import Action, KeptRates, Side
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
        rates: learning rates of the groups after each step; None, or nan for a group: not compared.
        additional: means of the additional losses of each step.
        calls: calls of each hook; of all ranks together, they are those of one process.
        state: parameters and persistent buffers by "layer.name", and outputs of evaluations.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    rates: list[list[float] | None] = field(default_factory=list)
    additional: list[float] = field(default_factory=list)
    calls: dict[Action, int] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


class Model:
    """Layers of a job, applied one after the other."""

    def __init__(self, job: Job) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.calls: list[Callable[[Any], Any]] = []
        ties: dict[str, dict[str, nn.Module]] = {}
        torch.manual_seed(job.seed)
        with job.built():
            for index, spec in enumerate(job.layers(TensorParallel(), plain=True)):
                torch.manual_seed(LAYER_SEED + index)
                if isinstance(spec, TiedLayerSpec):
                    module = _tied(spec, ties.setdefault(spec.key, {}))
                else:
                    module = spec.build() if isinstance(spec, LayerSpec) else spec
                if isinstance(module, nn.Module):
                    self.modules[index] = module
                function = getattr(spec, "forward_fn", None)
                self.calls.append(module if function is None else _Bound(function, module))
        end = ENDS[job.end]
        self.loss = (end.plain_loss or end.loss)()
        for module in self.modules.values():
            if job.section:  # DeepSpeed leaves buffers in fp32
                for p in module.parameters():
                    p.data = p.data.to(PRECISIONS[job.section])
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

    def loss_of(self, batch: tuple[Any, Any]) -> Any:
        """Return what the loss function returns for a micro-batch."""
        return self.output_and_loss(batch)[1]

    def output_and_loss(
        self, batch: tuple[Any, Any], context: Callable[[int], Any] = lambda layer: nullcontext()
    ) -> tuple[Any, Any]:
        """Return the output of the last layer, and what the loss function returns for a micro-batch.

        Args:
            context: function of the layer's index that returns the context of its forward.
        """
        x, labels = batch
        for index, call in enumerate(self.calls):
            with context(index):
                x = call(x)
        return x, x if self.loss is None else self.loss(x, labels)


def _tied(spec: TiedLayerSpec, ties: dict[str, nn.Module]) -> nn.Module:
    """Return the module of a spec: one for all specs of a key with the same class and arguments, else another one with
    the same weights."""
    name = f"{spec.typename} {spec.module_args} {spec.module_kwargs}"
    if name in ties:
        return ties[name]
    module = spec.build()
    for other in ties.values():
        for path in spec.tied_weight_attr:
            setattr(module, path, getattr(other, path))
    ties[name] = module
    return module


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


def make_optimizer(job: Job, groups: list[Any], part: int = 0) -> torch.optim.Optimizer:
    """Return torch's optimizer of a job's first or second layout, for parameters or parameter groups."""
    name, options = OPTIMIZERS[job.optimizer]["type"], dict(OPTIMIZERS[job.optimizer]["params"])
    options["lr"] = job.rate(part)
    options.pop("torch_adam", None)
    options.pop("adam_w_mode", None)
    return getattr(torch.optim, name)(groups, **options)


def parameter_groups(
    job: Job, parameters: Mapping[tuple[int, str], nn.Parameter], part: int = 0
) -> list[Any]:
    """Return the parameters, or the script's groups of them, of which some may be empty.

    Args:
        parameters: (layer, name) -> parameter, each once.
    """
    every = list(parameters.values())
    if job.groups:
        groups = [{"params": [], "name": name} for name in job.group_names]
        for (layer, name), parameter in parameters.items():
            groups[job.group_of(layer, name, parameter)]["params"].append(parameter)
        for number, group in enumerate(groups):
            group["lr"] = job.rate(part) * (1.0, 0.5, 0.75)[number]
        return groups
    if not job.decay_groups:
        return every
    groups = [
        {"params": [p for p in every if p.dim() > 1]},
        {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def distinct_parameters(
    modules: Mapping[int, nn.Module], all_parameters: bool
) -> dict[tuple[int, str], nn.Parameter]:
    """Return (layer, name) -> parameter, each once; only those that train unless ``all_parameters``."""
    ids: set[int] = set()
    parameters = {}
    for layer, module in sorted(modules.items()):
        for name, parameter in module.named_parameters():
            if id(parameter) not in ids and (all_parameters or parameter.requires_grad):
                ids.add(id(parameter))
                parameters[layer, name] = parameter
    return parameters


def make_scheduler(job: Job, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return the script's scheduler, which changes the learning rate after every step."""
    if job.scheduler == "lambdas":
        factors = (0.5, 0.75, 0.9)[: len(job.group_names)]
        return LambdaLR(optimizer, [partial(pow, factor) for factor in factors])
    return StepLR(optimizer, 1, 0.5)


class Plain(Side):
    """One process, with what a script sees of it."""

    def __init__(self, job: Job, noise: torch.Generator | None = None) -> None:
        self.job, self.part, self.result, self.noise = job, 0, Result(), noise
        self.model = Model(job)
        self.modules = self.model.modules
        self.whole = nn.ModuleDict({str(index): module for index, module in self.modules.items()})
        self.memory, self.optimizer, self.scheduler = {}, None, None
        self.replicas = Replicas(self.model, job.layout.pipes)
        self.micro_batches = job.micro_batches
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # of weights and fp32 master weights
        self._outputs = 0

    def set_up(self, part: int) -> None:
        """Make the optimizer and the scheduler."""
        job = self.job
        parameters = distinct_parameters(self.modules, job.passes_all)
        if job.has_masters:
            masters = {key: nn.Parameter(p.detach().float()) for key, p in parameters.items()}
            self.pairs = [(p, masters[key]) for key, p in parameters.items()]
            parameters = masters
        self.optimizer = make_optimizer(job, parameter_groups(job, parameters, part), part)
        if job.scheduler in ("script", "lambdas"):
            self.scheduler = make_scheduler(job, self.optimizer)
        elif job.scheduler == "json":
            self.scheduler = _make_json_scheduler(job, self.optimizer, part)

    @property
    def trained(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of the weights in the optimizer and what it steps, which may be the same."""
        if self.job.has_masters:
            return self.pairs
        return [(p, p) for group in self.optimizer.param_groups for p in group["params"]]

    # --- what scripts do ---

    def settle(self) -> None:
        pass

    def eval_mode(self) -> None:
        self.whole.eval()

    def keep_rates(self) -> None:
        self.scheduler = KeptRates()

    def resize(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches

    def evaluate(self, sizes: Evaluate) -> None:
        batches = evaluation_batches(self.job, sizes, self.micro_batches, self.replicas.count)
        outputs = self._evaluate(batches)
        for number, output in enumerate(outputs if sizes.logits else ()):
            self.result.state[f"outputs of {sizes}.{number}"] = output

    def _evaluate(self, batches: list[tuple[Any, Any]]) -> list[Any]:
        """Evaluate micro-batches, and return the outputs of the last layer."""
        self.replicas.average()
        modes = [(module, module.training) for module in self.whole.modules()]
        self.whole.eval()
        sums: dict[str, float] = {}
        counts: dict[str, float] = {}
        outputs = []
        with torch.no_grad():
            for inputs, labels in batches:
                output, loss = self.model.output_and_loss((inputs, labels))
                samples = _samples(labels)
                for name, (value, count) in terms(self.job, loss).items():
                    weight = samples if count is None else 1
                    sums[name] = sums.get(name, 0.0) + weight * float(value)
                    counts[name] = counts.get(name, 0.0) + float(samples if count is None else count)
                outputs.append(output)
        for module, training in modes:
            module.training = training
        self.result.evaluations.append(sum(sums[name] / (counts[name] or 1.0) for name in sums))
        return outputs

    def evaluate_after(self, step: int) -> None:
        """Evaluate if the job does so after this number of steps."""
        if self.job.evaluate_after == step:
            numbers = range(self.micro_batches)
            seed = self.job.seed_of(max(step - 1, 0))
            self._evaluate([ordered_batch(self.job, 0, number, EVALUATION, seed) for number in numbers])

    # --- steps ---

    def step(self, step: int) -> None:
        """Train one step."""
        if not self.whole.training:  # the script has set all to evaluation mode
            self.whole.train()
        job, result, pairs = self.job, self.result, self.trained
        with torch.no_grad():
            for p, master in self.pairs:  # weights that the script has set
                master.copy_(torch.where(master.to(p.dtype) == p, master, p.float()))
        loss, grads = self._gradients(step, [p for p, _ in pairs])
        if self.noise is not None:
            # A bf16 layer rounds gradients by the scale of the loss, and outputs by the strides of its inputs, both of
            # which differ in a pipeline. Adam makes a large step of that where a gradient plus its decay is near zero.
            _add_noise(grads, self.noise, BF16_NOISE if job.rounds else FP32_NOISE)
        for (p, master), grad in zip(pairs, grads, strict=True):
            if grad is None and job.shards and p.requires_grad:
                grad = torch.zeros_like(master)
            master.grad = None if grad is None else grad.to(master.dtype)
        limit = job.clip or float("inf")
        masters = [master for _, master in pairs]
        result.losses.append(0.0 if loss is None else loss)
        result.norms.append(_clip(masters, limit))
        if loss is not None:
            self.optimizer.step()
        self.optimizer.zero_grad()
        _copy(pairs)
        if self.scheduler is not None:
            self.scheduler.step()
        # No checkpoint has the rate of a group without parameters.
        result.rates.append(
            [
                float(group["lr"]) if group["params"] or self.part == 0 else math.nan
                for group in self.optimizer.param_groups
            ]
        )

    def _gradients(
        self, step: int, parameters: list[nn.Parameter]
    ) -> tuple[float | None, list[Tensor | None]]:
        """Return the loss of a step, and its gradients in fp32; None for unused parameters.

        The loss is None if no label is counted. Such a step changes no weight.
        """
        job, model = self.job, self.model
        batches = step_batches(job, step)
        divisors = self._divisors(batches)
        grads: list[Tensor | None] = [None] * len(parameters)
        sums: dict[str, float] = {}
        counts: dict[str, float] = {}
        additional: dict[str, float] = {}
        scale = LOSS_SCALE if job.fp16 else 1.0
        for number, batch in enumerate(batches):
            self.replicas.use(number * self.replicas.count // len(batches))
            _, loss = model.output_and_loss(batch, partial(_random_numbers, job, step, number))
            total: Tensor | float = 0.0
            for name, (value, count) in terms(job, loss).items():
                # Means are divided before the backward, because bf16 gradients are rounded in it.
                sums[name] = sums.get(name, 0.0) + float(value.detach())
                counts[name] = counts.get(name, 0.0) + float(1 if count is None else count)
                total = total + value / (len(batches) if count is None else divisors.get(name, 1.0))
            assert isinstance(total, Tensor)
            (scale * total).backward()
            for name, value in (getattr(model.loss, "additional_losses", None) or {}).items():
                additional[name] = additional.get(name, 0.0) + float(torch.as_tensor(value).detach()) / len(
                    batches
                )
            for index, p in enumerate(parameters):
                if p.grad is not None:
                    grad = p.grad.float() if p.dtype in PRECISIONS.values() else p.grad
                    before = grads[index]
                    grads[index] = grad if before is None else before + grad
            for p in self.whole.parameters():
                p.grad = None
        self.result.additional += additional.values()
        if ENDS[job.end].pairs and not any(counts.values()):
            return None, grads
        correction = 1.0
        if not divisors and ENDS[job.end].pairs:
            (correction,) = counts.values()
        grads = [None if grad is None else grad / (scale * correction) for grad in grads]
        return sum(sums[name] / (counts[name] or 1.0) for name in sums), grads

    def _divisors(self, batches: list[tuple[Any, Any]]) -> dict[str, float]:
        """Return the counts of several terms, by which their gradients are divided; empty for one term."""
        count = getattr(self.model.loss, "counts", None)
        sums: dict[str, float] = {}
        for counts in [count(labels) for _, labels in batches] if count is not None else ():
            for name, value in counts.items() if isinstance(counts, Mapping) else ():
                sums[name] = sums.get(name, 0.0) + float(value)
        return {name: value or 1.0 for name, value in sums.items()}

    # --- resume ---

    def continue_in_second_layout(self, step: int) -> None:
        """Do what a save, and a load in the second layout, do to the state."""
        job = self.job
        self.replicas.average()
        for action in job.script:
            action.before_save(self)
        self.part, self.micro_batches = 1, job.micro_batches_at(step)  # those of the second JSON
        if job.set_weights == "save":
            self.model.halve()
            _copy((master, p) for p, master in self.pairs)
        self.whole.train()
        for action in job.script:
            action_is_earlier = action.step < step and action.repeats
            if action_is_earlier and type(action).__name__ != "Hook":  # hooks are still registered here
                action.again(self)
        if job.resume_with in ("module_only", "no_optimizer", "own_file"):
            self.set_up(1)
        elif job.scheduler == "json":
            self.scheduler = _make_json_scheduler(job, self.optimizer, 1)
            self.scheduler.step(step - 1)
        assert job.resume is not None
        self.replicas = Replicas(self.model, job.resume.pipes)


def _clip(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Clip the gradients as torch does, with a norm in fp32 or fp64, and return the norm."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return 0.0
    if any(grad.is_complex() for grad in grads):
        norm = float(nn.utils.get_total_norm(grads))
    else:
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    for grad in grads if norm > limit else ():
        grad.mul_(limit / (norm + 1e-6))
    return norm


def _samples(labels: Any) -> int:
    while not isinstance(labels, Tensor):
        labels = labels[0]
    return len(labels)


def terms(job: Job, loss: Any) -> dict[str, tuple[Tensor, Any]]:
    """Return the terms of a loss: name -> (sum, count), or (mean, None)."""
    end = ENDS[job.end]
    if end.metric:
        return {"": (loss[0], None)}
    if isinstance(loss, Mapping):
        return dict(loss)
    return {"": tuple(loss) if end.pairs else (loss, None)}  # pyright: ignore[reportReturnType]


def _make_json_scheduler(job: Job, optimizer: torch.optim.Optimizer, part: int) -> Any:
    return getattr(lr_schedules, JSON_SCHEDULER)(optimizer, **job.scheduler_params(part))


def train(job: Job, noise_seed: int | None = None) -> Result:
    """Train a job in one process.

    Args:
        noise_seed: seed of rounding errors that are added to the first weights, so that gradients of rounding errors
            only change, and to all gradients; None: no errors. The difference of two results shows how sensitive the
            job is to the order of sums.
    """
    noise = None if noise_seed is None else torch.Generator().manual_seed(noise_seed)
    plain = Plain(job, noise)
    for action in job.script:
        action.at_start(plain)
    if job.set_weights in ("load", "assign"):
        plain.model.halve()
        plain.replicas = Replicas(plain.model, job.layout.pipes)
    if noise is not None and not job.half:
        trained = distinct_parameters(plain.modules, job.passes_all)
        _add_noise([p.detach() for p in trained.values()], noise, FP32_NOISE)
    if noise is not None and job.rounds:
        # A gradient can be the small sum of large terms, as that of a bias, and has the rounding errors of the terms.
        # Tensor-parallel ranks round inside a layer, where each of them has a part of a sum.
        for module in plain.modules.values():
            for inner in module.modules():
                inner.register_forward_hook(partial(_round_output, noise))
    plain.set_up(0)
    plain.evaluate_after(0)
    for step in range(job.steps):
        if job.resume is not None and step == job.resume_after:
            plain.continue_in_second_layout(step)
        for action in job.script:
            action.before_step(plain, step)
        plain.step(step)
        for action in job.script:
            action.after_step(plain, step)
        plain.evaluate_after(step + 1)
    for action in job.script:
        action.before_step(plain, job.steps)
    plain.replicas.average()
    plain.result.state |= plain.model.state()
    return plain.result


@torch.no_grad()
def _copy(pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Copy master weights to the weights, which may be the same."""
    for parameter, master in pairs:
        if parameter is not master:
            parameter.copy_(master)


def _random_numbers(job: Job, step: int, micro_batch: int, layer: int) -> AbstractContextManager[Any]:
    """Return the context in which a layer draws its random numbers."""
    if not KEYED_RANDOM:
        return nullcontext()
    from ds_ext.tensor_parallel import layer_key  # pyright: ignore[reportAttributeAccessIssue]

    key = layer_key(job.seed_of(step), job.engine_step(step), micro_batch, layer)
    return keyed_rng(key, torch.device("cpu"))


def _round_output(noise: torch.Generator, _module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Return the output of a layer with further rounding errors, in its gradient too, if it is in half precision."""
    if isinstance(output, tuple):
        return tuple(_round_output(noise, _module, _inputs, value) for value in output)
    if not isinstance(output, Tensor) or output.dtype not in PRECISIONS.values():
        return output
    return output * (1 + BF16_NOISE / 2 * torch.randn(output.shape, generator=noise)).to(output.dtype)


def _add_noise(tensors: Sequence[Tensor | None], noise: torch.Generator, size: float) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            tensor += (
                size * tensor.abs().max() * torch.randn(tensor.shape, generator=noise, dtype=tensor.dtype)
            )
