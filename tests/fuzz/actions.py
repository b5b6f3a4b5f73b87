"""Actions of scripts: each is one habit of training scripts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.optim.swa_utils import AveragedModel

from .scripts import AT_START, Action, Side, changed, set_weights
from .zoo import ZOO

if TYPE_CHECKING:
    from .job import Job

DECAY = 0.5  # of moving averages


def _draw_step(random: Random, job: Job, first: int = 0) -> int:
    return random.randrange(first, job.steps)


def _draw_layers(random: Random, job: Job) -> tuple[int, ...]:
    """Draw up to half of the layers, neighbours or not, with all that share a parameter with one of them."""
    count = random.randrange(1, max(2, job.num_layers // 2 + 1))
    if random.random() < 0.5:
        first = random.randrange(job.num_layers - count + 1)
        layers = set(range(first, first + count))
    else:
        layers = set(random.sample(range(job.num_layers), count))
    return tuple(sorted({index for group in job.sharing if group & layers for index in group} | layers))


def _takes_all_that_share(job: Job, layers: tuple[int, ...]) -> bool:
    """Return whether the layers are all that share their parameters; another habit may have changed the blocks."""
    return all(group <= {*layers} or not group & {*layers} for group in job.sharing)


def _trains_untied(job: Job, layers: tuple[int, ...]) -> bool:
    """Return whether one of the layers is tied by some of its parameters only, which ds_ext refuses to train whole."""
    return any(job.layer_kinds[index] == "tied_frozen" for index in layers)


# --- what trains, and in which mode ---


@dataclass(frozen=True)
class Toggle(Action):
    """Set ``requires_grad`` of all parameters of some layers."""

    layers: tuple[int, ...] = ()
    trains: bool = False

    @property
    def needs_all_parameters(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.step != AT_START

    def act(self, side: Side) -> None:
        for parameter in side.parameters(self.layers):
            parameter.requires_grad_(self.trains)

    @classmethod
    def draw(cls, random: Random, job: Job) -> Action | None:
        first, *_ = job.toggles or (None,)
        if first is not None:  # the same layers, the other way
            later = range(first.step + 1, job.steps)
            return cls(random.choice(later), first.layers, not first.trains) if later else None
        step = random.choice((AT_START, *range(1, job.steps)))
        return cls(step, _draw_layers(random, job), step != AT_START and random.random() < 0.3)

    def refuses(self, job: Job, key: str) -> bool:
        if self.step == AT_START:  # ranks or groups that train nothing
            return key in ("layers", "model_parameters")
        if key == "tied_weight_attr":
            return _trains_untied(job, self.layers)
        names = [name for name in key.split(", ") if name != "..."]
        changed = {*map(str, self.layers), "tied_modules"}
        return job.shards and all(name.partition(".")[0] in changed for name in names)

    def fits(self, job: Job) -> bool:
        return super().fits(job) and _takes_all_that_share(job, self.layers) and not job.has_head_parts


@dataclass(frozen=True)
class AddGroup(Action):
    """Train some layers, which are frozen at first, from a step on, in a parameter group added then."""

    layers: tuple[int, ...] = ()

    def at_start(self, side: Side) -> None:
        for parameter in side.parameters(self.layers):
            parameter.requires_grad_(False)

    def act(self, side: Side) -> None:
        parameters = side.parameters(self.layers)
        for parameter in parameters:
            parameter.requires_grad_(True)
        if side.optimizer is not None:
            side.optimizer.add_param_group({"params": parameters, "lr": 0.5 * side.job.rate(side.part)})

    @classmethod
    def draw(cls, random: Random, job: Job) -> Action | None:
        return cls(_draw_step(random, job, 1), _draw_layers(random, job))

    def refuses(self, job: Job, key: str) -> bool:
        return key == "layers" or (key == "tied_weight_attr" and _trains_untied(job, self.layers))

    def fits(self, job: Job) -> bool:
        # DeepSpeed's own optimizers have no add_param_group().
        others = job.shards or job.toggles or job.groups or job.scheduler or job.resume or job.decay_groups
        is_whole = _takes_all_that_share(job, self.layers)
        return super().fits(job) and is_whole and not others and not job.has_head_parts


@dataclass(frozen=True)
class Mode(Action):
    """Put some layers into evaluation mode, once or before every step."""

    layers: tuple[int, ...] = ()
    every: bool = False

    def act(self, side: Side) -> None:
        for module in side.chosen(self.layers):
            module.eval()

    def before_step(self, side: Side, step: int) -> None:
        if step == self.step or (self.every and step > self.step):
            self.act(side)

    @classmethod
    def draw(cls, random: Random, job: Job) -> Action | None:
        modal = [index for index, kind in enumerate(job.layer_kinds) if kind in job.MODAL]
        if modal and random.random() < 0.9:
            layers = {*modal, *_draw_layers(random, job)} if random.random() < 0.5 else {random.choice(modal)}
        else:
            layers = {*_draw_layers(random, job)}
        return cls(random.randrange(job.steps), tuple(sorted(layers)), random.random() < 0.5)

    def fits(self, job: Job) -> bool:
        others = self.every or not any(isinstance(action, EvalMode) for action in job.script)
        # A forward rank of several backward ranks has the statistics of one of them.
        joined = any(layout.backward_per_forward > 1 for layout in job.layouts)
        running = joined and any(job.layer_kinds[index] in job.RUNNING for index in self.layers)
        return super().fits(job) and others and not running and not job.has_head_parts


@dataclass(frozen=True)
class EvalMode(Action):
    """Evaluate after ``eval()`` of everything, which the script does not take back."""

    repeats = False

    def act(self, side: Side) -> None:
        side.eval_mode()
        side.evaluate(Evaluate(self.step))

    @classmethod
    def draw(cls, random: Random, job: Job) -> Action | None:
        return cls(random.randrange(job.steps + 1))


# --- parameter groups ---


@dataclass(frozen=True)
class EditGroup(Action):
    """Set the learning rate or weight decay of a parameter group, found by its position or its name."""

    group: int | str = 0
    key: str = "lr"
    factor: float = 0.25

    repeats = False

    def act(self, side: Side) -> None:
        if side.optimizer is None:
            return
        groups = side.optimizer.param_groups
        if isinstance(self.group, str):
            chosen = [group for group in groups if group.get("name") == self.group]
        else:
            chosen = [groups[self.group]]
        for group in chosen:
            group[self.key] = self.factor * side.job.rate(0) if self.key == "lr" else 0.3 * self.factor

    @classmethod
    def draw(cls, random: Random, job: Job) -> Action | None:
        names = job.group_names
        key = random.choice(("lr", "lr", "weight_decay"))
        index = random.randrange(len(names))
        by_name = names[index] and random.random() < 0.3
        return cls(
            _draw_step(random, job), names[index] if by_name else index, key, random.choice((0.0, 0.25, 2.0))
        )

    def fits(self, job: Job) -> bool:
        names = job.group_names
        exists = self.group in names if isinstance(self.group, str) else self.group < len(names)
        # The script itself leaves out groups on some ranks, or the documented split of the groups changes positions.
        return super().fits(job) and exists and not job.decay_groups and not job.overlap


@dataclass(frozen=True)
class KeepRates(Action):
    """Replace the scheduler by one that does not change the learning rates."""

    repeats = False

    def act(self, side: Side) -> None:
        side.keep_rates()

    @classmethod
    def draw(cls, random: Random, job: Job) -> Action | None:
        return cls(_draw_step(random, job))

    def fits(self, job: Job) -> bool:
        return super().fits(job) and not job.scheduler


# --- weights ---


@dataclass(frozen=True)
class EditWeights(Action):
    """Change all weights in place: "scale", "clamp" or "noise"; or "data", which assigns new tensors."""

    how: str = "scale"

    repeats = False

    def act(self, side: Side) -> None:
        with torch.no_grad():
            for weight in side.weights:
                if self.how == "data":
                    weight.data = weight.data * 0.75
                elif self.how == "clamp" and weight.is_floating_point():
                    weight.clamp_(-0.3, 0.3)
                elif self.how == "noise":
                    generator = Generator().manual_seed(3)
                    noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                    weight.add_(0.01 * noise.to(weight.dtype))
                else:
                    weight.mul_(0.75)

    @classmethod
    def draw(cls, random: Random, job: Job) -> Action | None:
        return cls(random.randrange(job.steps + 1), random.choice(("scale", "clamp", "noise", "data")))

    def fits(self, job: Job) -> bool:
        # Shards of a weight would need parts of the noise of the whole one.
        sharded = any(layout.tp > 1 for layout in job.layouts) and job.has_shards
        return super().fits(job) and not (self.how == "noise" and (sharded or job.has_head_parts))


@dataclass(frozen=True)
class Average(Action):
    """Average the weights from a step on, and evaluate or save with the averages.

    Attributes:
        swap: step before which the averages are swapped in for an evaluation, and put back. If the job resumes then,
            they are swapped in for its save.
        how: the averages are tensors that are copied ("copy"), assigned ("data") or loaded ("load"); those of
            torch's AveragedModel ("averaged_model"); or of a copy of the module ("deepcopy").
    """

    swap: int = 0
    how: str = "copy"

    repeats = False

    def act(self, side: Side) -> None:
        weights = side.weights
        if self.how == "averaged_model":
            side.memory[self] = AveragedModel(side.whole, avg_fn=_moving_average)
            side.memory[self].update_parameters(side.whole)
        elif self.how == "deepcopy":
            side.memory[self] = copy.deepcopy(side.whole)
        else:
            side.memory[self] = [weight.detach().clone() for weight in weights]

    def after_step(self, side: Side, step: int) -> None:
        if self not in side.memory:
            return
        weights = side.weights
        if self.how == "averaged_model":
            side.memory[self].update_parameters(side.whole)
        else:
            with torch.no_grad():
                for average, weight in zip(self._averages(side), weights, strict=True):
                    average.lerp_(weight, DECAY)

    def before_step(self, side: Side, step: int) -> None:
        super().before_step(side, step)
        if step != self.swap or self not in side.memory:
            return
        weights, averages = side.weights, self._averages(side)
        before = [weight.detach().clone() for weight in weights]
        self._swap(side, weights, averages)
        side.evaluate(Evaluate(step))
        self._swap(side, weights, before)

    def before_save(self, side: Side) -> None:
        if self.swap == side.job.resume_after:
            self._swap(side, side.weights, self._averages(side))
            del side.memory[self]

    def _averages(self, side: Side) -> list[Tensor]:
        kept = side.memory[self]
        if isinstance(kept, list):
            return kept
        module = kept.module if isinstance(kept, AveragedModel) else kept
        own = {name: p for name, p in side.whole.named_parameters()}
        copies = {id(own[name]): p for name, p in module.named_parameters() if name in own}
        return [copies[id(weight)].detach() for weight in side.weights]

    def _swap(self, side: Side, weights: list[nn.Parameter], values: list[Tensor]) -> None:
        if self.how == "data":
            for weight, value in zip(weights, values, strict=True):
                weight.data = value.to(weight.dtype)
        elif self.how == "load":
            by_weight = {id(weight): value for weight, value in zip(weights, values, strict=True)}
            for module in side.modules.values():
                state = {
                    name: by_weight[id(p)] for name, p in module.named_parameters(remove_duplicate=False)
                }
                module.load_state_dict(state, strict=False)
        else:
            set_weights(weights, values)

    @classmethod
    def draw(cls, random: Random, job: Job) -> Action | None:
        step = random.randrange(job.steps)
        how = random.choice(("copy", "data", "load", "averaged_model", "deepcopy"))
        if job.resume is not None and random.random() < 0.6:
            return cls(random.randrange(job.resume_after), job.resume_after, how)
        return cls(step, random.randrange(step + 1, job.steps + 1), how)

    @property
    def _copies_module(self) -> bool:
        return self.how in ("averaged_model", "deepcopy")

    def refuses(self, job: Job, key: str) -> bool:
        return self._copies_module and key == "PipelineModule"

    def fits(self, job: Job) -> bool:
        # Hooks keep the engine, and the script that resumes has no averages.
        copied = self._copies_module and any(isinstance(action, Hook) for action in job.script)
        return self.swap <= job.steps and not copied and (job.resume is None or self.swap <= job.resume_after)


def _moving_average(average: Tensor, weight: Tensor, count: Any) -> Tensor:
    return average + DECAY * (weight - average)


# --- evaluations and sizes ---


@dataclass(frozen=True)
class Evaluate(Action):
    """Evaluate other data, with other sizes.

    Attributes:
        micro_batch_size: samples of a micro-batch; 0: that of the job.
        micro_batches: number per data-parallel rank; 0: that of the steps.
        samples: evaluate a whole dataset of this number of samples, if it is not 0.
        logits: return the outputs of the last layer too.
    """

    micro_batch_size: int = 0
    micro_batches: int = 0
    samples: int = 0
    logits: bool = False

    repeats = False

    def act(self, side: Side) -> None:
        side.settle()
        side.evaluate(self)

    @classmethod
    def draw(cls, random: Random, job: Job) -> Action | None:
        step = random.randrange(job.steps + 1)
        logits = job.returns_logits and random.random() < 0.5
        if random.random() < 0.3:
            return cls(step, samples=random.randrange(1, 12), logits=logits)
        return cls(step, random.choice((0, 1, 2, 3)), random.choice((0, 1, 2, 3)), 0, logits)

    def fits(self, job: Job) -> bool:
        outputs = not self.logits or (job.returns_logits and not job.has_head_parts)
        # Layers that need the sizes of the samples of training, or that mix the samples of a micro-batch.
        return super().fits(job) and outputs


@dataclass(frozen=True)
class Resize(Action):
    """Change the number of micro-batches per step from a step on."""

    micro_batches: int = 1

    repeats = False  # the JSON of the script that resumes has it

    def act(self, side: Side) -> None:
        side.resize(self.micro_batches)

    @classmethod
    def draw(cls, random: Random, job: Job) -> Action | None:
        counts = [n for n in range(1, 9) if all(layout.supports(n) for layout in job.layouts)]
        return cls(_draw_step(random, job, 1), random.choice(counts)) if job.steps > 1 else None

    def fits(self, job: Job) -> bool:
        supported = all(layout.supports(self.micro_batches) for layout in job.layouts)
        one = sum(isinstance(action, Resize) for action in job.script) == 1
        return super().fits(job) and one and supported and job.data != "loader" and 0 < self.step < job.steps


# --- hooks ---


@dataclass(frozen=True)
class Hook(Action):
    """Register a hook on a layer, its parameters or its outputs: it counts its calls, and changes numbers.

    Attributes:
        kind: "forward", "forward_pre", "full_backward" (module), "parameter", "accumulated" (parameter), "boundary"
            (outputs of the layer).
    """

    layers: tuple[int, ...] = ()
    kind: str = "forward"

    def act(self, side: Side) -> None:
        for module in side.chosen(self.layers):
            if self.kind == "forward":
                module.register_forward_hook(partial(self._scale_output, side))
            elif self.kind == "forward_pre":
                module.register_forward_pre_hook(partial(self._scale_input, side))
            elif self.kind == "full_backward":
                module.register_full_backward_hook(partial(self._scale_gradients, side))
            elif self.kind == "boundary":
                module.register_forward_hook(partial(self._watch_output, side))
        for parameter in side.parameters(self.layers) if self.kind in ("parameter", "accumulated") else ():
            if not parameter.requires_grad:
                continue
            if self.kind == "parameter":
                parameter.register_hook(partial(self._scale, side, 0.5))
            else:
                parameter.register_post_accumulate_grad_hook(partial(self._count, side))

    def _count(self, side: Side, *_: Any) -> None:
        side.result.calls[self] = side.result.calls.get(self, 0) + 1

    def _scale(self, side: Side, factor: float, value: Tensor) -> Tensor:
        self._count(side)
        return factor * value

    def _scale_output(self, side: Side, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        self._count(side)
        return changed(outputs, lambda value: 1.25 * value)

    def _scale_input(self, side: Side, module: nn.Module, inputs: Any) -> Any:
        self._count(side)
        return changed(inputs, lambda value: 0.75 * value)

    def _scale_gradients(self, side: Side, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        self._count(side)
        return changed(inputs, lambda value: 0.5 * value)

    def _watch_output(self, side: Side, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for value in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(self._scale, side, 0.5))

    def counted(self, job: Job) -> bool:
        """Return whether the calls over all ranks must be those of one process.

        A parameter of several stages gets a gradient in each.
        """
        shared = any(group & {*self.layers} for group in job.sharing)
        return self.kind != "accumulated" and not (self.kind == "parameter" and shared)

    KINDS: ClassVar = ("forward", "forward_pre", "full_backward", "parameter", "accumulated", "boundary")

    @classmethod
    def draw(cls, random: Random, job: Job) -> Action | None:
        return cls(random.randrange(job.steps), _draw_layers(random, job), random.choice(cls.KINDS))

    def fits(self, job: Job) -> bool:
        # torch calls no full backward hook of a compiled module.
        is_called = self.kind != "full_backward" or not job.compiled
        # torch forgets the hooks of a view, such as the output of a linear layer, when it is changed in place.
        is_kept = self.kind != "boundary" or not any(ZOO[name].changes_input for name in job.blocks)
        return super().fits(job) and is_called and is_kept and not job.has_head_parts


ACTIONS: dict[str, type[Action]] = {
    action.__name__: action
    for action in (
        Toggle,
        AddGroup,
        Mode,
        EvalMode,
        EditGroup,
        KeepRates,
        EditWeights,
        Average,
        Evaluate,
        Resize,
        Hook,
    )
}
