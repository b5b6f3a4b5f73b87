"""Types over the axes of the layout: silent for right jobs, and a wrong reduction is named with its line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_ext
from ds_ext.comm.native_transport import NativeTransport
from ds_ext.engine.engine import PipelineEngine
from ds_ext.engine.stages.body import Body
from ds_ext.engine.weights import norm
from ds_ext.engine.weights.gradients import Gradients
from ds_ext.engine.weights.reduction import EagerReduction
from tests.engine_runs import MODEL, Job, StepBatches, batches_of, build, train
from tests.layout_flow import DIFFERS, PARTIAL, REPLICATED, SHARDED, Fault
from tests.layout_types import LayoutError, call_checked, checked, replaced
from tests.precisions import needs
from tests.ranks import Ranks

ROOT = Path(ds_ext.__file__).parents[1]
STEPS = 2
MODEL_2 = dataclasses.replace(MODEL, num_layers=4)
ZERO = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
BF16 = {"bf16": {"enabled": True}}
TIED = "tied_modules.embed.word_embeddings.weight"


def job(schedule: str, pp: int = 2, tp: int = 1, dp: int = 1, n: int = 2, **kwargs: Any) -> Job:
    return Job(schedule, pp, tp, dp, n, kwargs.pop("model", MODEL_2), STEPS, **kwargs)


# --- right jobs ---

RIGHT = {
    "data": job("1f1b", dp=2),
    "late": job("1f1b", dp=2, eager=False),
    "tie": job("1f1b"),
    "pipes": job("bitpipe"),
    "pipes and data": job("bitpipe", dp=2),
    "zero": job("bitpipe", deepspeed=ZERO),
    "late zero": job("zb_v", dp=2, eager=False, deepspeed=ZERO),
    "overlap": job("bitpipe_zb", overlap=True, deepspeed=ZERO),
    "tensor": job("1f1b", tp=2),
    "tensor, tokens": job("zb_v", tp=2, model=dataclasses.replace(MODEL_2, sequence_parallel=True)),
    "tensor and zero": job("bitpipe", tp=2, deepspeed=ZERO),
    "head in parts": job("zb_v", n=4, head_parts=True),
    "groups": job("interleaved", dp=2, decay_groups=True, options={"chunks": 2}),
    "fbd": job("fbd", n=4),
    "fbd and zero": job("fbd", n=4, deepspeed=ZERO, fbd={"backward_per_forward": 2}),
    "dpp": job("dpp", n=4),
}
HALF = {
    "bf16": job("bitpipe", deepspeed=BF16),
    "late bf16": job("zb_v", dp=2, eager=False, deepspeed=BF16),
    "bf16 and zero": job("1f1b", dp=2, deepspeed={**BF16, **ZERO}),
    "bf16 and overlap": job("bitpipe", overlap=True, deepspeed=BF16),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_jobs_have_right_types(ranks: Ranks, name: str) -> None:
    ranks(RIGHT[name].world_size).run(call_checked, train, RIGHT[name])


@needs("bf16")
@pytest.mark.parametrize("name", HALF)
def test_right_jobs_in_half_precision_have_right_types(ranks: Ranks, name: str) -> None:
    ranks(HALF[name].world_size).run(call_checked, train, HALF[name])


def save_and_load(rank: int, folder: str) -> None:
    engine, _ = build(RIGHT["pipes"])
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    engine.transport.close()


def test_checkpoints_have_replicated_weights(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(call_checked, save_and_load, str(tmp_path))


# --- wrong jobs: each replaces a part of the engine ---


def skip(original: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def twice(original: Any, *args: Any, **kwargs: Any) -> Any:
    original(*args, **kwargs)
    return original(*args, **kwargs)


def count_all(original: Any, parameter: Any, tensor_rank: int) -> bool:
    return True


def count_first(original: Any, parameter: Any, tensor_rank: int) -> bool:
    return tensor_rank == 0


def keep_gradients(original: Any, reduction: Any, stage: int | None) -> None:
    gradients = [(parameter, parameter.grad) for parameter in reduction.parameters[stage]]
    original(reduction, stage)
    for parameter, gradient in gradients:
        parameter.grad = gradient


def reverse_on_rank_0(original: Any, reduction: Any, stage: int | None) -> None:
    reduction.parameters[stage].sort(key=lambda p: p.numel() * (1 - 2 * (dist.get_rank() == 0)))
    original(reduction, stage)


def reduce_alone(original: Any, reduction: Any, *args: Any, **kwargs: Any) -> None:
    """Reduce over this rank only."""
    gradients = reduction._gradients
    group, gradients.group = gradients.group, ALONE[0]
    original(reduction, *args, **kwargs)
    gradients.group = group


ALONE: list[Any] = []


def divide_again(original: Any, reduction: Any, *args: Any, **kwargs: Any) -> None:
    original(reduction, *args, **kwargs)
    if args[0] == 0:
        reduction._pending[-1][0].wait()
        reduction._pending[-1][1].div_(2)


def disturb_outputs(original: Any, *args: Any) -> Any:
    """Return other outputs on every rank."""
    return tuple(t + dist.get_rank() if t.is_floating_point() else t for t in original(*args))


def disturb_sent(original: Any, transport: Any, tensors: Any, *args: Any) -> Any:
    return original(transport, [t + 1 if t.is_floating_point() else t for t in tensors], *args)


def lose(original: Any, engine: PipelineEngine, *args: Any) -> None:
    if engine.module.device_index == 0:
        weight = engine.module.get_parameter("1.weight")
        weight.grad = torch.zeros_like(weight).neg()
    original(engine, *args)


def drift(original: Any, engine: PipelineEngine, *args: Any) -> None:
    original(engine, *args)
    if dist.get_rank() == 0:
        with torch.no_grad():
            next(engine.module.parameters()).add_(1.0)


def move_frozen(original: Any, engine: PipelineEngine, *args: Any) -> None:
    original(engine, *args)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(0.0 if parameter.requires_grad else 1.0)


def raise_rate(original: Any, engine: PipelineEngine, *args: Any) -> None:
    original(engine, *args)
    engine.optimizer.param_groups[0]["lr"] += 0.01 * dist.get_rank()


@dataclasses.dataclass(frozen=True)
class Wrong:
    """Job with a replaced method, and the fault that it has.

    Attributes:
        owner, method: what is replaced.
        wrapper: replacement; it gets the original first.
        found, axis: type of a tensor over an axis.
        expected: type that its use needs.
        file: file of the line.
        code: text in the line, if it is a line of the engine.
        name: parameter or message; "": any.
        frozen: layers that are not trained.
    """

    job: Job
    owner: Any
    method: str
    wrapper: Callable[..., Any]
    found: str
    axis: str
    expected: str
    file: str
    code: str = ""
    name: str = ""
    frozen: tuple[str, ...] = ()

    def has(self, fault: Fault) -> bool:
        """Return whether a fault is the expected one, and its line exists."""
        path, _, number = fault.line.rpartition(" ")[2].rpartition(":")
        line = (ROOT / path).read_text().splitlines()[int(number) - 1]
        return (
            (fault.found, fault.axis, fault.expected) == (self.found, self.axis, self.expected)
            and fault.name.startswith(self.name)
            and path == self.file
            and self.code in line
        )


BASE, SYNC, EAGER, NORM = (
    f"ds_ext/engine/{name}.py"
    for name in ("deepspeed_api/base", "weights/gradients", "weights/reduction", "weights/norm")
)
MESSAGES = "ds_ext/engine/executor.py"
STEP = "super()._take_model_step(lr_kwargs)"
WRONG = {
    "no reduction": Wrong(
        *(RIGHT["late"], PipelineEngine, "allreduce_gradients", skip, PARTIAL, "data", REPLICATED, BASE, STEP)
    ),
    "no reduction over pipes": Wrong(
        *(RIGHT["pipes"], EagerReduction, "_start", reduce_alone, PARTIAL, "pipes", REPLICATED, BASE, STEP)
    ),
    "no reduction with zero": Wrong(
        *(RIGHT["zero"], EagerReduction, "_start", reduce_alone, PARTIAL, "pipes", REPLICATED, BASE, STEP)
    ),
    "no reduction of a tie": Wrong(
        *(RIGHT["tie"], Gradients, "sum_tied", skip, PARTIAL, "tie", REPLICATED, BASE, STEP, TIED)
    ),
    "two reductions of a tie": Wrong(
        *(RIGHT["tie"], Gradients, "sum_tied", twice, REPLICATED, "tie", PARTIAL, SYNC, "all_reduce", TIED)
    ),
    "two reductions": Wrong(
        RIGHT["late"],
        PipelineEngine,
        "allreduce_gradients",
        twice,
        REPLICATED,
        "data",
        PARTIAL,
        BASE,
        "_exec_reduce_grads",
    ),
    "another order": Wrong(
        *(
            RIGHT["data"],
            EagerReduction,
            "_reduce",
            reverse_on_rank_0,
            DIFFERS,
            "data",
            PARTIAL,
            EAGER,
            "all_reduce",
        )
    ),
    "another average": Wrong(
        *(
            RIGHT["pipes"],
            EagerReduction,
            "_start",
            divide_again,
            DIFFERS,
            "data",
            REPLICATED,
            EAGER,
            "all_reduce",
        )
    ),
    "a lost gradient": Wrong(
        *(
            RIGHT["tie"],
            PipelineEngine,
            "_take_model_step",
            lose,
            PARTIAL,
            "data",
            REPLICATED,
            BASE,
            STEP,
            "1.weight",
        )
    ),
    "a norm of all copies": Wrong(
        *(
            RIGHT["tie"],
            norm,
            "counts_here",
            count_all,
            REPLICATED,
            "tie",
            SHARDED,
            NORM,
            "all_reduce",
            TIED,
        )
    ),
    "a norm of all tensor ranks": Wrong(
        *(
            RIGHT["tensor"],
            norm,
            "counts_here",
            count_all,
            REPLICATED,
            "tensor",
            SHARDED,
            NORM,
            "all_reduce",
        )
    ),
    "a norm without shards": Wrong(
        *(
            RIGHT["tensor"],
            norm,
            "counts_here",
            count_first,
            DIFFERS,
            "tensor",
            SHARDED,
            NORM,
            "all_reduce",
        )
    ),
    "a replica with another weight": Wrong(
        *(RIGHT["data"], PipelineEngine, "_take_model_step", drift, DIFFERS, "data", REPLICATED, BASE, STEP)
    ),
    "a frozen weight that moves": Wrong(
        *(
            RIGHT["pipes"],
            PipelineEngine,
            "_take_model_step",
            move_frozen,
            DIFFERS,
            "steps",
            REPLICATED,
            BASE,
            STEP,
        ),
        frozen=("2.", "3."),
    ),
    "another rate of a replica": Wrong(
        *(
            RIGHT["data"],
            PipelineEngine,
            "_take_model_step",
            raise_rate,
            DIFFERS,
            "data",
            REPLICATED,
            BASE,
            STEP,
        )
    ),
    "messages of tensor ranks": Wrong(
        *(RIGHT["tensor"], Body, "outputs_for", disturb_outputs, DIFFERS, "tensor", REPLICATED, MESSAGES),
        "messages.send",
    ),
    "messages between stages": Wrong(
        *(
            RIGHT["pipes"],
            NativeTransport,
            "send",
            disturb_sent,
            DIFFERS,
            "stages",
            REPLICATED,
            MESSAGES,
        ),
        "messages.receive",
    ),
}


def train_wrong(rank: int, name: str) -> None:
    wrong = WRONG[name]
    engine, _ = build(wrong.job)
    for parameter_name, parameter in engine.module.named_parameters():
        if parameter_name.startswith(wrong.frozen):
            parameter.requires_grad_(False)
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    ALONE[:] = [groups[rank]]
    data = StepBatches(batches_of(wrong.job))
    try:
        with replaced(wrong.owner, wrong.method, wrong.wrapper), checked():
            engine.train_batch(data)
    finally:
        engine.transport.close()


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_is_named_with_its_line(ranks: Ranks, name: str) -> None:
    wrong = WRONG[name]
    with pytest.raises(LayoutError) as info:
        ranks(wrong.job.world_size).run(train_wrong, name)
    first = info.value.faults[0]
    assert wrong.has(first), str(first)
