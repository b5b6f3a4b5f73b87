"""Random jobs: a model from the zoo, a schedule, parallel sizes and options."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, ClassVar

import torch

from ds_ext.parallel.fbd import make_layout
from ds_ext.parallel.layout import ParallelLayout
from ds_ext.pipe_schedules import Placement, get_schedule
from ds_ext.tensor_parallel import TensorParallel
from tests.plans import placement_of

from .decoder_layers import DECODERS
from .kinds import LENGTH, Place
from .scripts import AT_START, Action
from .sliced_layers import SLICED
from .zoo import ENDS, STARTS, ZOO, model_layers

PATIENCE = float(
    os.environ.get("FUZZ_PATIENCE", "1")
)  # factor of time limits, for a host that is busy otherwise

# Features that jobs may use.
LOSS_PAIRS = True  # losses that return a pair (sum, count)
KEYED_RANDOM = True  # layers that draw random numbers in training
UNUSED_KEEP_NONE = True  # unused parameters with an optimizer that moves parameters of zero gradient

BIDIRECTIONAL = ("chimera", "bitpipe", "bitpipe_zb")
LINEAR = ("gpipe", "1f1b", "zb_h1")
V_SHAPED = ("zb_v", "dualpipev", "dpp")
LATE_WEIGHTS = (
    "zb_h1",
    "zb_v",
    "bitpipe_zb",
)  # schedules that defer weight gradients until after another backward
SCHEDULES = (*LINEAR, "interleaved", *V_SHAPED, *BIDIRECTIONAL, "fbd")
MAX_RANKS = 4
MAX_FBD_RANKS = 6  # for two backward ranks per forward rank
MAX_MICRO_BATCHES = 8  # of a step, over all data-parallel ranks
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"type": "SGD", "params": {"lr": 0.2}},
    "momentum": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    # A large epsilon, because gradients that consist of rounding errors would otherwise become full steps.
    "adamw": {
        "type": "AdamW",
        "params": {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3, "torch_adam": True},
    },
    "adam": {
        "type": "Adam",
        "params": {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3, "torch_adam": True, "adam_w_mode": False},
    },
    # Its step needs a closure, so an engine must refuse it.
    "lbfgs": {"type": "LBFGS", "params": {"lr": 0.1}},
}
# Names of the parameter groups that a script makes, see ``group_of``.
GROUPS: dict[str, tuple[str, ...]] = {
    "": ("",),
    "layers": ("early", "late"),
    "ends": ("first", "middle", "last"),
    "names": ("weights", "biases", "others"),
}
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 64.0  # of fp16
RANDOM = tuple(name for name, kind in ZOO.items() if kind.random)
JSON_SCHEDULER = "WarmupDecayLR"
MOVES_AT_ZERO_GRADIENT = ("adamw", "adam")
SHARE_GRADIENTS = (
    "query_positions",
    "added_parameter",
)  # with the layers whose weight gradients are deferred
# Refused with slices: tokens that depend on tokens of other slices, on their position in the sample, or on all tokens.
MIXES_TOKENS = (
    *("self_attention", "causal_attention", "encoder_layer", "conv1d", "depthwise_conv", "conv_transpose"),
    *("conv2d", "group_norm", "lstm", "gru", "rnn", "cell_loop", "positions", "either", "embedding_bag"),
    *("double_weight", "flipped", "pooled", "views", "other_layouts", "auxiliary_loss", "transposed"),
)
# Differ with slices: statistics, counters and hooks of single passes, and numbers drawn per slice.
OF_PASSES = (
    *("batch_norm", "cumulative_batch_norm", "instance_norm", "counter", "weight_hook", "twice_hooked"),
    *(name for name in DECODERS if name.endswith("_tokens")),
    *(name for name, kind in ZOO.items() if kind.statistics or kind.random or kind.fixed_length),
)
MAY_BE_UNUSED = ("unused", "either", "experts", "detached_input", "jvp")


class Short:
    """Dataclass whose representation leaves out the defaults."""

    def __repr__(self) -> str:
        values = [(one, getattr(self, one.name)) for one in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        shown = [f"{one.name}={value!r}" for one, value in values if value != _default(one)]
        return f"{type(self).__name__}({', '.join(shown)})"


def _default(one: dataclasses.Field[Any]) -> Any:
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


@dataclass(frozen=True, repr=False)
class Layout(Short):
    """Schedule and parallel sizes of a job."""

    schedule: str = "1f1b"
    pp: int = 1
    tp: int = 1
    dp: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    backward_per_forward: int = 1  # fbd
    slices: int | tuple[int, ...] = 1  # equal slices of a sequence, or their lengths
    head_parts: bool = False

    @property
    def section(self) -> dict[str, Any]:
        """The ``"ds_ext"`` section of the JSON."""
        section = {
            "schedule": self.schedule,
            "pipeline_parallel_size": self.pp,
            "tensor_parallel_size": self.tp,
            "schedule_options": self.options,
            "sequence_slices": self.num_slices,
            "slice_lengths": "equal" if isinstance(self.slices, int) else list(self.slices),
            "vocabulary_parallel_head": self.head_parts,
            "print_plan": False,
            "transport_options": {"timeout_s": 20.0 * PATIENCE},
        }
        if self.schedule == "fbd":
            section["fbd"] = {"backward_per_forward": self.backward_per_forward}
        return section

    @property
    def num_slices(self) -> int:
        return self.slices if isinstance(self.slices, int) else len(self.slices)

    @property
    def has_slices(self) -> bool:
        """Return whether the schedule runs in slices of sequences."""
        return get_schedule(self.schedule).has_slices and self.options.get("mode") != "unit"

    def cuts(self, length: int) -> bool:
        """Return whether the slices add up to a sequence."""
        return length % self.slices == 0 if isinstance(self.slices, int) else length == sum(self.slices)

    @property
    def placement(self) -> Placement:
        return placement_of({"ds_ext": self.section})

    @property
    def ranks(self) -> ParallelLayout:
        return make_layout(self.placement, self.tp, self.dp)

    @property
    def pipes(self) -> int:
        """Data-parallel ranks, replicas included."""
        return self.dp * self.placement.replicas

    def supports(self, micro_batches: int) -> bool:
        """Return whether the schedule supports a number of micro-batches per step, over all data-parallel ranks."""
        if micro_batches % self.pipes:
            return False
        of_group = micro_batches // self.dp
        if self.schedule in ("interleaved", "chimera") or self.options.get("mode") == "unit":
            return of_group % self.pp == 0
        return self.schedule != "dualpipev" or of_group >= 2 * self.pp


@dataclass(frozen=True, repr=False)
class Job(Short):
    """Training run with the same result in one process.

    Attributes:
        layout: schedule and parallel sizes.
        start, blocks, end: names in STARTS, ZOO and ENDS.
        micro_batches: number per step, over all data-parallel ranks.
        double: weights, buffers and samples are fp64.
        data: "dataset" (training_data), "random_dataset" (whose samples are drawn), "batches" (an object with get and
            advance), "iterator" (own micro-batches of each data-parallel rank), "loader" (the same from a shuffled
            DataLoader) or "unequal" (an iterator that yields other samples on ranks without a first stage).
        length: tokens of the longest sample.
        variable_lengths: each micro-batch has a different number of tokens.
        evaluate_after: steps before an evaluation; None: no evaluation.
        set_weights: the script sets the weights: "load" or "assign" after initialize(), "save" before the checkpoint.
        scheduler: learning-rate scheduler: "script" (torch's, passed by the script) or "json" (DeepSpeed's).
        decay_groups: two parameter groups; biases have no weight decay.
        own_optimizer: the script passes the optimizer instead of the JSON.
        rank_seeds: the ranks have different seeds after the model is built, and others after a resume.
        audit: every step is audited.
        overlap: weights are gathered beside the next step.
        empty_first: the script passes an empty iterator to train_batch(), and catches the error.
        resume: layout that continues from a checkpoint; None: no checkpoint.
        resume_after: steps before the checkpoint.
        resume_rate: factor of the learning rate in the JSON that continues.
        script: what the script does around the steps.
        weights: "bf16" or "fp16": layers are built with such weights, whatever the JSON says.
        fp16: the JSON has the section "fp16".
        groups: key of GROUPS: the script's parameter groups.
        by_accumulation: the JSON has gradient_accumulation_steps instead of train_batch_size: micro-batches per
            data-parallel rank, of which a script counts its own sizes only.
        resume_with: how the script that resumes loads: "" or "not_strict" (everything), "module_only", "no_optimizer"
            or "own_file" (a file with the weights only, by load_state_dict).
        compiled: layers are compiled by torch.compile: "first", "second" or "both" layouts, or the "engine" does it.
    """

    RUNNING: ClassVar = ("batch_norm", "cumulative_batch_norm", "instance_norm")  # kinds with statistics
    MODAL: ClassVar = (*RUNNING, *RANDOM)  # kinds with two modes

    seed: int = 0
    layout: Layout = Layout()
    start: str = "floats"
    blocks: tuple[str, ...] = ("linear",)
    end: str = "mean_square"
    partition: str | tuple[int, ...] = "uniform"
    steps: int = 3
    micro_batch_size: int = 2
    micro_batches: int = 4
    optimizer: str = "sgd"
    clip: float = 0.0
    zero: int = 0
    bf16: bool = False
    double: bool = False
    checkpoint_interval: int = 0
    eager_gradient_sync: bool = True
    data: str = "batches"
    length: int = LENGTH
    variable_lengths: bool = False
    evaluate_after: int | None = None
    set_weights: str = ""
    scheduler: str = ""
    decay_groups: bool = False
    own_optimizer: bool = False
    rank_seeds: bool = False
    audit: bool = False
    overlap: bool = False
    empty_first: bool = False
    resume: Layout | None = None
    resume_after: int = 1
    resume_rate: float = 1.0
    script: tuple[Action, ...] = ()
    weights: str = ""
    fp16: bool = False
    groups: str = ""
    by_accumulation: bool = False
    resume_with: str = ""
    compiled: str = ""

    def config(self, part: int) -> dict[str, Any]:
        """Return the DeepSpeed JSON of the first or second layout."""
        layout = self.layouts[part]
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_clipping": self.clip,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "ds_ext": {
                **layout.section,
                "eager_gradient_sync": self.eager_gradient_sync,
                "audit_interval": int(self.audit),
                "overlap_across_steps": self.overlap,
            },
        }
        micro_batches = self.micro_batches_at(self.resume_after if part else 0)
        if self.by_accumulation:
            config["gradient_accumulation_steps"] = micro_batches // layout.dp
        else:
            config["train_batch_size"] = micro_batches * self.micro_batch_size
        if not self.own_optimizer:
            optimizer = OPTIMIZERS[self.optimizer]
            params = {**optimizer["params"], "lr": self.rate(part)}
            config["optimizer"] = {**optimizer, "params": params}
        if self.scheduler == "json":
            config["scheduler"] = {"type": JSON_SCHEDULER, "params": self.scheduler_params(part)}
        if self.zero:
            config["zero_optimization"] = {"stage": self.zero}
        if self.bf16:
            config["bf16"] = {"enabled": True}
        if self.fp16:
            config["fp16"] = {"enabled": True, "loss_scale": LOSS_SCALE}
        return config

    @property
    def section(self) -> str:
        """The section of the JSON for half precision; "" without one."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else ""

    @property
    def half(self) -> str:
        """Half precision of the weights in training: "bf16", "fp16" or ""."""
        return self.section or self.weights

    @property
    def shards(self) -> bool:
        """True if DeepSpeed's own optimizer keeps master weights."""
        return self.zero > 0 or bool(self.section)

    @property
    def has_masters(self) -> bool:
        """True if the step changes fp32 copies of half-precision weights."""
        return bool(self.section) or (self.zero > 0 and bool(self.weights))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and samples."""
        return PRECISIONS.get(self.half) or (torch.float64 if self.double else torch.float32)

    @contextmanager
    def built(self) -> Iterator[None]:
        """Return a context in which layers are built with fp64 or half-precision weights if the job has them."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(PRECISIONS.get(self.weights) or (torch.float64 if self.double else before))
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def rate(self, part: int) -> float:
        """Return the learning rate of the first or second layout's JSON."""
        return OPTIMIZERS[self.optimizer]["params"]["lr"] * (self.resume_rate if part else 1.0)

    def scheduler_params(self, part: int) -> dict[str, Any]:
        """Return the parameters of the scheduler in the first or second layout's JSON."""
        rate = self.rate(part)
        steps = {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear"}
        return {"warmup_min_lr": 0.1 * rate, "warmup_max_lr": rate, **steps}

    def layers(self, tp: TensorParallel, plain: bool = False) -> list[Any]:
        """Return the layers of the model, those of one process if they are others."""
        return model_layers(self.start, self.blocks, self.end, tp, plain)

    @property
    def layer_kinds(self) -> list[str]:
        """Names of start, kind or end of every layer."""
        names = [self.start] * len(STARTS[self.start].layers())
        for name in self.blocks:
            names += [name] * len(ZOO[name].layers(Place(0, TensorParallel())))
        return names + [self.end] * len(ENDS[self.end].layers())

    @property
    def sharing(self) -> list[set[int]]:
        """Layers that share parameters, in groups."""
        return _sharing(self.start, self.blocks, self.end)

    def group_of(self, layer: int, name: str, parameter: torch.nn.Parameter) -> int:
        """Return the parameter group of a parameter, which is the same for all layers that share it."""
        if self.groups == "names":
            return 0 if parameter.dim() > 1 and "bias" not in name else 1 if name.endswith("bias") else 2
        layer = min([layer, *(index for group in self.sharing if layer in group for index in group)])
        if self.groups == "layers":
            return int(layer >= self.num_layers // 2)
        if self.groups == "ends":
            return 0 if layer == 0 else 2 if layer >= self.num_layers - 1 else 1
        return 0

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the parameter groups of the optimizer."""
        return GROUPS[self.groups]

    @property
    def toggles(self) -> list[Any]:
        """Actions that set ``requires_grad``."""
        return [action for action in self.script if type(action).__name__ == "Toggle"]

    @property
    def passes_all(self) -> bool:
        """True if the script gives the optimizer all parameters, also frozen ones."""
        return any(action.needs_all_parameters for action in self.script)

    @property
    def adds_groups(self) -> bool:
        """True if the script adds a parameter group to the optimizer."""
        return any(type(action).__name__ == "AddGroup" for action in self.script)

    @property
    def must_be_refused(self) -> bool:
        """True if no pipeline can train the job."""
        return self.optimizer == "lbfgs"

    @property
    def has_head_parts(self) -> bool:
        """True if a layout divides the head over its devices."""
        return any(layout.head_parts for layout in self.layouts)

    @property
    def has_shards(self) -> bool:
        """True if a layer is sharded over tensor-parallel ranks."""
        return bool({*self.blocks} & {"sharded_mlp", "gpt_layer", "llama_layer", *DECODERS})

    @property
    def returns_logits(self) -> bool:
        """True if an evaluation can return the outputs of the last layer."""
        return ENDS[self.end].plain_loss is None and self.end not in ("output_pair", "loss_layer")

    @property
    def restarts(self) -> bool:
        """True if the script that resumes starts at step 0, with the saved weights."""
        return self.resume is not None and self.resume_with in ("module_only", "own_file")

    def part_of(self, step: int) -> int:
        """Return the index of the layout of a step."""
        return int(self.resume is not None and step >= self.resume_after)

    def micro_batches_at(self, step: int) -> int:
        """Return the number of micro-batches of a step, over all data-parallel ranks."""
        sizes = [
            action for action in self.script if type(action).__name__ == "Resize" and action.step <= step
        ]
        return sizes[-1].micro_batches if sizes else self.micro_batches  # pyright: ignore[reportAttributeAccessIssue]

    def engine_step(self, step: int) -> int:
        """Return the engine's number of a step."""
        return step - self.resume_after if self.restarts and self.part_of(step) else step

    def position(self, step: int) -> int:
        """Return the number of micro-batches that the engine has trained before a step."""
        return sum(self.micro_batches_at(earlier) for earlier in range(step - self.engine_step(step), step))

    def seed_of(self, step: int) -> int:
        """Return the seed of random numbers in a step."""
        return self.seed + 100 * self.rank_seeds * (self.restarts and self.part_of(step))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens of successive micro-batches: shorter ones have shorter slices."""
        step = math.lcm(*(layout.num_slices for layout in self.layouts))
        return tuple(self.length - step * i for i in range(3 if self.variable_lengths else 1))

    @property
    def is_sliced(self) -> bool:
        """True if a layout runs in slices."""
        return any(layout.num_slices > 1 for layout in self.layouts)

    @property
    def layouts(self) -> list[Layout]:
        """The layouts in which the job runs, in order."""
        return [self.layout] if self.resume is None else [self.layout, self.resume]

    @property
    def rounds(self) -> bool:
        """True if a part of the model computes in half precision."""
        return bool(self.half) or any(ZOO[name].rounds for name in self.blocks)

    @property
    def has_doubles(self) -> bool:
        """True if the model trains fp64 weights."""
        return self.double or (not self.section and any(ZOO[name].doubles for name in self.blocks))

    @property
    def is_mixed(self) -> bool:
        """True if the model trains weights of several dtypes."""
        dtypes = {ZOO[name].mixed for name in self.blocks} - {None, self.dtype}
        return not self.section and bool(dtypes or any(ZOO[name].doubles for name in self.blocks))

    @property
    def is_reproducible(self) -> bool:
        """False if results depend on the schedule or on features that are switched off."""
        kinds = [ZOO[name] for name in self.blocks]
        if any(one.backward_per_forward > 1 for one in self.layouts) and any(
            kind.statistics for kind in kinds
        ):
            return False
        fits = all(layout.cuts(length) for layout in self.layouts for length in self.lengths)
        if not fits or (self.is_sliced and {*self.blocks} & {*OF_PASSES}):
            return False
        if ENDS[self.end].start not in (None, self.start) or (self.start == "tied_tokens") != (
            ENDS[self.end].start == "tied_tokens"
        ):
            return False
        if self.weights and self.double:
            return False
        if self.bf16 and self.fp16:
            return False
        if (self.half and (any(kind.fp32 for kind in kinds) or self.start == "complex_tokens")) or (
            self.lengths != (LENGTH,) and any(kind.fixed_length for kind in kinds)
        ):
            return False
        if self.checkpoint_interval and (
            any(kind.changes_input for kind in kinds) or self.start.endswith("in_place")
        ):
            return False
        if (
            self.micro_batch_size == 1
            and any(kind.changes_gradient for kind in kinds)
            and any(kind.keeps_gradient for kind in kinds)
        ):
            # The change reaches the parameter's gradient too, but not if that gradient is added to an earlier one or a
            # stage begins between the two: two loops in plain torch, with and without zero_grad(), differ as well.
            return False
        if self.checkpoint_interval and self.is_sliced and any(kind.inner_backward for kind in kinds):
            # torch recomputes the layers before it in the forward, which then read earlier slices twice: an error.
            return False
        if self.double and "glm4_moe_decoder" in self.blocks:  # its router computes in fp32
            return False
        if self.resume is None and (self.set_weights == "save" or self.resume_rate != 1):
            return False
        is_complex = self.start == "complex_tokens" or any("complex" in name for name in self.blocks)
        if self.double and is_complex and self.resume is not None:  # safetensors has no complex128
            return False
        if self.variable_lengths and self.data == "loader":  # a shuffled batch has samples of several lengths
            return False
        if not LOSS_PAIRS and ENDS[self.end].pairs:
            return False
        if (self.overlap or self.audit) and any(layout.schedule == "fbd" for layout in self.layouts):
            return False
        if not KEYED_RANDOM and any(kind.random for kind in kinds):
            return False
        if self.resume is None and (self.resume_with or self.compiled in ("first", "second")):
            return False
        if self.resume_with == "own_file" and (
            self.has_head_parts or any(layout.tp > 1 for layout in self.layouts)
        ):
            return False
        # Its rates are those of the first optimizer, its counters those of the script.
        if self.resume_with and self.resume_with != "not_strict" and self.scheduler:
            return False
        if self.scheduler == "lambdas" and (self.decay_groups or self.overlap):
            return False
        if self.groups and (self.decay_groups or self.overlap or self.optimizer == "lbfgs"):
            return False
        if self.groups in ("layers", "ends") and self.has_head_parts:  # parts are other layers
            return False
        layers = {layer for action in self.script for layer in getattr(action, "layers", ())}
        if not layers <= {*range(self.num_layers)} or not all(action.fits(self) for action in self.script):
            return False
        freezes = self.adds_groups or any(action.step == AT_START for action in self.toggles)
        # The script cannot make an optimizer on a rank that trains nothing.
        if self.own_optimizer and freezes and not self.passes_all:
            return False
        if layers == {*range(self.num_layers)} and freezes and not self.passes_all:  # nothing trains
            return False
        moves = self.optimizer in MOVES_AT_ZERO_GRADIENT
        return UNUSED_KEEP_NONE or not (moves and set(self.blocks) & set(MAY_BE_UNUSED))

    @property
    def features(self) -> frozenset[str]:
        """Names of the kinds, schedules and options that differ from those of the smallest job."""
        plain = Job()
        names = {*self.blocks, self.start, self.end, *(layout.schedule for layout in self.layouts)}
        names |= {size for size in ("tp", "dp") for layout in self.layouts if getattr(layout, size) > 1}
        names |= {"head_parts" for layout in self.layouts if layout.head_parts}
        options = (
            "clip",
            "optimizer",
            "zero",
            "bf16",
            "double",
            "checkpoint_interval",
            "data",
            "length",
            "variable_lengths",
            "is_sliced",
        )
        options += ("evaluate_after", "set_weights", "scheduler", "decay_groups", "own_optimizer", "resume")
        options += ("rank_seeds", "audit", "overlap", "empty_first", "resume_rate")
        options += ("weights", "fp16", "groups", "by_accumulation", "resume_with", "compiled")
        names |= {type(action).__name__ for action in self.script}
        names |= {name for name in options if getattr(self, name) != getattr(plain, name)}
        return frozenset(names - {"linear", plain.start, plain.end, plain.layout.schedule})

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return len(self.layers(TensorParallel()))

    @property
    def choices(self) -> set[str]:
        """Names of what the job draws, for counts of coverage."""
        names = {f"start {self.start}", f"end {self.end}", f"optimizer {self.optimizer}", f"data {self.data}"}
        names |= {f"kind {name}" for name in self.blocks}
        for layout in self.layouts:
            names |= {f"schedule {layout.schedule}", f"sizes {layout.pp} x {layout.tp} x {layout.dp}"}
            if layout.head_parts:
                names.add(f"parts {layout.schedule}")
            if layout.num_slices > 1:
                names |= {f"sliced {layout.schedule}", f"slices {str(layout.slices).replace(' ', '')}"}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.name not in ("seed", "optimizer", "data") and isinstance(value, bool | int | float):
                names.add(f"{one.name} {value:g}" if not isinstance(value, bool) else f"{one.name} {value}")
        names |= {f"set_weights {self.set_weights or 'no'}", f"scheduler {self.scheduler or 'none'}"}
        names |= {f"weights {self.weights or 'as drawn'}", f"groups {self.groups or 'none'}"}
        names |= {f"resume_with {self.resume_with or 'everything'}", f"compiled {self.compiled or 'no'}"}
        names |= {f"action {type(action).__name__}" for action in self.script}
        return names | {f"resume {self.resume is not None}", f"evaluate {self.evaluate_after is not None}"}


@functools.lru_cache(256)
def _sharing(start: str, blocks: tuple[str, ...], end: str) -> list[set[int]]:
    from .reference import Model

    owners: dict[int, set[int]] = {}
    with torch.random.fork_rng(devices=[]):  # the seed of this rank stays
        modules = Model(Job(start=start, blocks=blocks, end=end)).modules
    for index, module in modules.items():
        for parameter in module.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    groups: list[set[int]] = []
    for layers in owners.values():
        joined = set(layers).union(*(group for group in groups if group & layers))
        groups = [*(group for group in groups if not group & layers), joined]
    return [group for group in groups if len(group) > 1]


def draw_layout(random: Random) -> Layout:
    """Draw a schedule, and sizes that need at most MAX_RANKS ranks, or MAX_FBD_RANKS."""
    schedule = random.choice((*SCHEDULES, "fbd", "fbd"))
    while True:
        pp, tp, dp = (
            random.choice((2, 3) if schedule == "fbd" else (1, 2, 2, 2, 3, 4, 4)),
            random.choice((1, 1, 1, 2)),
            random.choice((1, 1, 2)),
        )
        options: dict[str, Any] = {}
        if schedule in BIDIRECTIONAL and pp % 2:
            continue
        if schedule == "interleaved":
            options["chunks"] = random.choice((1, 2, 2, 3))
        if schedule == "bitpipe":
            options["mode"] = random.choice(("unit", "unit", "greedy"))
        layout = Layout(schedule, pp, tp, dp, options, random.choice((1, 2)) if schedule == "fbd" else 1)
        if layout.ranks.world_size <= (MAX_FBD_RANKS if schedule == "fbd" else MAX_RANKS):
            return layout


def draw(seed: int) -> Job:
    """Draw the job of a seed."""
    random = Random(seed)
    while True:
        job = _draw(random, seed)
        if job is not None and job.is_reproducible:
            return job


def _chance(random: Random, probability: float) -> bool:
    return random.random() < probability


def _draw(random: Random, seed: int) -> Job | None:
    layout = draw_layout(random)
    micro_batches = random.choice([n for n in range(1, MAX_MICRO_BATCHES + 1) if layout.supports(n)])
    steps = random.choice((2, 3, 3, 4))
    resume = draw_layout(random) if _chance(random, 0.2) else None
    if resume is not None and not resume.supports(micro_batches):
        return None
    start = random.choice([name for name, one in STARTS.items() if one.drawn])
    end = random.choice([name for name, one in ENDS.items() if one.drawn])
    if ENDS[end].start is not None:
        start = "tied_tokens"
    blocks = _draw_blocks(random, start, end, [one for one in (layout, resume) if one])
    bf16 = _chance(random, 0.2)
    data = random.choice(2 * ("dataset", "random_dataset", "batches", "iterator", "loader") + ("unequal",))
    if data in ("iterator", "loader", "unequal") and any(
        one.schedule == "chimera" for one in (layout, resume) if one
    ):
        # One rank needs the inputs of one pipe and the labels of the other: refused, which a few jobs show.
        data = data if _chance(random, 0.1) else "dataset"
    job = Job(
        seed=seed,
        layout=layout,
        start=start,
        blocks=blocks,
        end=end,
        steps=steps,
        micro_batch_size=random.choice((1, 1, 1, 2) if {*blocks} & {*SHARE_GRADIENTS} else (1, 1, 2, 3)),
        micro_batches=micro_batches,
        optimizer=random.choice(("sgd", "sgd", "momentum", "adamw", "adam")),
        clip=random.choice((0.0, 0.0, 0.05, 1.0)),
        zero=random.choice((0, 0, 1)),
        bf16=bf16,
        double=not bf16 and _chance(random, 0.1),
        checkpoint_interval=random.choice((0, 0, 0, 1, 2)),
        eager_gradient_sync=_chance(random, 0.7),
        data=data,
        variable_lengths=_chance(random, 0.2),
        evaluate_after=random.randrange(steps + 1) if _chance(random, 0.5) else None,
        set_weights=random.choice(("load", "assign", *(("save",) * 4 if resume else ())))
        if _chance(random, 0.4 if resume else 0.2)
        else "",
        scheduler=random.choice(("script", "json")) if _chance(random, 0.3) else "",
        decay_groups=_chance(random, 0.15),
        own_optimizer=_chance(random, 0.15),
        rank_seeds=_chance(random, 0.8 if any(ZOO[name].random for name in blocks) else 0.5),
        empty_first=_chance(random, 0.05),
        resume=resume,
        resume_after=random.randrange(1, steps),
        resume_rate=random.choice((1.0, 0.5)) if resume else 1.0,
    )
    if job.zero and job.has_doubles and _chance(random, 0.9):  # refused, which a few jobs show
        job = dataclasses.replace(job, zero=0)
    job = _draw_head_parts(Random(-2 - seed), _draw_slices(Random(-1 - seed), job))
    partition = _draw_partition(random, job)
    audit = _chance(random, 0.15) and all(one.schedule != "fbd" for one in job.layouts)
    audit = audit and not (job.is_sliced and random.random() < 0.9)  # refused, which a few jobs show
    overlap = _chance(random, 0.6) and (job.bf16 or job.zero > 0)
    overlap = overlap and all(one.schedule != "fbd" for one in job.layouts)
    return dataclasses.replace(job, partition=partition, audit=audit, overlap=overlap)


def _draw_head_parts(random: Random, job: Job) -> Job:
    """Draw which layouts divide the head over their devices, if the job can divide it."""
    if not job.end.startswith("divided_"):
        return job

    def divided(layout: Layout) -> Layout:
        # The ends are not sharded.
        fits = layout.schedule not in ("fbd", "dpp") and layout.tp == 1
        return dataclasses.replace(layout, head_parts=fits and _chance(random, 0.8))

    job = dataclasses.replace(job, layout=divided(job.layout), resume=job.resume and divided(job.resume))
    if any(layout.head_parts for layout in job.layouts):  # the head is in no stage
        job = dataclasses.replace(job, blocks=(*job.blocks, "linear"))
    return job


def _draw_slices(random: Random, job: Job) -> Job:
    """Draw slices for the layouts that support them, and layers and losses that mostly do."""
    if not any(layout.has_slices for layout in job.layouts) or _chance(random, 0.5):
        return job
    if _chance(random, 0.3):
        job = dataclasses.replace(job, length=random.randrange(4, 13), variable_lengths=False)
        count, unit = random.choice((2, 3, 4)), job.length
    else:
        count, unit = 0, random.choice((2, 3, 4))
        tokens = random.choice((1, 2, 2, 3)) + 2 * job.variable_lengths
        job = dataclasses.replace(job, length=unit * tokens)

    def sliced(layout: Layout) -> Layout:
        if not layout.has_slices:
            return layout
        cuts = [0, *sorted(random.sample(range(1, unit), count - 1)), unit] if count else []
        lengths = tuple(stop - start for start, stop in pairwise(cuts))
        equal = random.choice([k for k in (1, unit, unit, 2) if unit % k == 0])
        return dataclasses.replace(layout, slices=lengths or equal)

    job = dataclasses.replace(job, layout=sliced(job.layout), resume=job.resume and sliced(job.resume))
    unfit = {*OF_PASSES} if _chance(random, 0.15) else {*OF_PASSES, *MIXES_TOKENS}
    fit = [*[name for name, kind in ZOO.items() if kind.weight and name not in unfit], *5 * [*SLICED]]
    blocks = [random.choice(fit) if name in unfit else name for name in job.blocks]
    blocks.insert(random.randrange(len(blocks) + 1), random.choice([*SLICED]))
    end = job.end
    if not ENDS[end].pairs and _chance(random, 0.9):
        tied = job.start == "tied_tokens"
        end = random.choice(
            [name for name, one in ENDS.items() if one.pairs and one.drawn and bool(one.start) == tied]
        )
    job = dataclasses.replace(job, blocks=tuple(blocks), end=end)
    missing = max(layout.placement.stages for layout in job.layouts) - job.num_layers
    return dataclasses.replace(job, blocks=(*job.blocks, *["linear"] * missing))


def _draw_blocks(random: Random, start: str, end: str, layouts: list[Layout]) -> tuple[str, ...]:
    """Draw blocks until the model has a layer per stage, often of few kinds; then those that its schedules need."""
    stages = max(layout.placement.stages for layout in layouts)
    schedules = {layout.schedule for layout in layouts}
    names = [name for name, kind in ZOO.items() for _ in range(kind.weight)]
    kinds = random.sample(names, random.choice((1, 2, 3, 8)))
    blocks: list[str] = []
    wanted = max(stages, random.randrange(2, 9))
    while len(model_layers(start, blocks, end, TensorParallel())) < wanted:
        blocks.append(random.choice([*kinds, "linear"]))
    # Faults of some stages of some schedules with some kinds, which rarely meet by chance: only forward ranks of fbd
    # between the first and the last draw random numbers that another rank draws too and are not rank 0, whose seed all
    # ranks use; and only some devices defer weight gradients until after the next backward.
    for group, kinds in (({"fbd"}, RANDOM), ({*LATE_WEIGHTS}, SHARE_GRADIENTS)):
        if schedules & group and _chance(random, 0.5):
            for _ in range(stages):
                blocks.insert(random.randrange(len(blocks) + 1), random.choice(kinds))
    if _chance(random, 0.1):
        # Only in the last stage, where a backward follows its forward, does a changed buffer first reach a second half.
        blocks.append("linear_of_buffer")
    return tuple(blocks)


def _draw_partition(random: Random, job: Job) -> str | tuple[int, ...]:
    """Draw DeepSpeed's partition or, without a resume, boundaries."""
    if job.resume is not None or job.layout.head_parts or _chance(random, 0.6):
        return random.choice(("uniform", "parameters"))
    layers, stages = job.num_layers, job.layout.placement.stages
    return (0, *sorted(random.sample(range(1, layers), stages - 1)), layers)
