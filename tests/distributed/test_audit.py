"""Audits: no false alarm, and every flipped bit is found in the audited step and its rank is named."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_ext
from ds_ext.config.job import load_config
from ds_ext.engine.recovery.audit import tensor_checksum
from ds_ext.engine.stages.body import Body
from ds_ext.errors import ConfigError, CorruptionError
from ds_ext.pipe_schedules.bridge import BackwardInput
from ds_ext.planner.job_plan import make_job_plan
from ds_ext.tensor_parallel import earlier_slices
from tests.ranks import Ranks
from tests.selection import EVERYTHING, covering

WIDTH, STEPS, FAULT_STEP = 8, 40, 4
# Schedule, pipeline size, data-parallel size on 4 ranks.
JOBS = {
    "1f1b x 2": ("1f1b", 2),
    "bitpipe": ("bitpipe", 4),
    "bitpipe_zb": ("bitpipe_zb", 4),
    "dpp": ("dpp", 2),
    "slices": ("1f1b in 4", 2),
    "split slices": ("bitpipe_zb in 4", 4),
}


class Block(nn.Module):
    """With dropout of torch's generator and a buffer that the forward changes and uses."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.dropout(torch.relu(self.norm(self.linear(x)))) + 0.1 * self.calls.to(x.dtype)


class Summing(nn.Module):
    """A token reads the sum of those before it; with slices, each has dropout of torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD = self.dropout(torch.relu(self.linear(x_BSD)))
        earlier = earlier_slices(self, y_BSD.sum(1, keepdim=True))
        return x_BSD + 0.1 * (y_BSD.cumsum(1) + sum(total for (total,) in earlier))


class SquaredError(nn.Module):
    def forward(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return (outputs - labels).float().square().sum(), labels.numel()


def make_engine(
    schedule: str, pipeline: int, zero: int, interval: int, bf16: bool = False, layers: Any = (Block,) * 8
) -> Any:
    schedule, _, slices = schedule.partition(" in ")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 16,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "ds_ext": {
            **{"schedule": schedule, "pipeline_parallel_size": pipeline, "audit_interval": interval},
            "sequence_slices": int(slices or 1),
            "print_plan": False,
        },
    }
    if bf16:
        config["bf16"] = {"enabled": True}
    model = ds_ext.PipelineModule(
        [LayerSpec(Summing if slices else layer) for layer in layers],
        config,
        loss_fn=SquaredError() if slices else nn.MSELoss(),
        partition_method="uniform",
        seed_layers=True,
    )
    shape = (64, 8, WIDTH) if slices else (64, WIDTH)
    samples = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    samples = samples.bfloat16() if bf16 else samples
    data = torch.utils.data.TensorDataset(samples, samples.flip(1))
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), training_data=data)
    torch.manual_seed(engine.global_rank)
    return engine


def losses(rank: int, schedule: str, pipeline: int, zero: int, interval: int, bf16: bool, steps: int) -> Any:
    engine = make_engine(schedule, pipeline, zero, interval, bf16)
    found = [float(engine.train_batch()) for _ in range(steps)]
    calls = [float(buffer) for name, buffer in engine.module.named_buffers() if name.endswith("calls")]
    audit = engine.audit
    engine.transport.close()
    return found, calls, None if audit is None else (audit.done, audit.clean)


@pytest.mark.parametrize(("job", "zero", "bf16"), covering(product(JOBS, [0, 1], [False, True]), 1))
def test_audits_change_nothing_and_raise_no_alarm(ranks: Ranks, job: str, zero: int, bf16: bool) -> None:
    schedule, pipeline = JOBS[job]
    steps = 1000 if EVERYTHING else 10
    run = ranks(4)
    plain = run.run(losses, schedule, pipeline, zero, 0, bf16, steps, timeout_s=600)
    audited = run.run(losses, schedule, pipeline, zero, 1, bf16, steps, timeout_s=600)
    assert [result[:2] for result in audited] == [result[:2] for result in plain]
    assert {result[2] for result in audited} == {(steps, steps)}


FLIPPED_IN: list[int] = []  # steps, on the faulty rank


def flip(tensor: Tensor) -> None:
    """Flip the lowest bit of the middle element."""
    flat = tensor.detach().view(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    flat[len(flat) // 2] ^= 1


def flip_weight_between_steps(engine: Any, step: int) -> None:
    FLIPPED_IN.append(step)
    flip(next(iter(engine.module.parameters())).data)


def set_forward(engine: Any, forward: Any) -> None:
    """Set the function that computes the outputs of every stage of layers."""
    for stage in engine.executor.stages.values():
        if isinstance(stage, Body):
            stage.compute = forward


def flip_weight_in_the_step(engine: Any, step: int) -> None:
    forward = forward_of(engine)

    def then_flip(*args: Any) -> Any:
        outputs = forward(*args)
        set_forward(engine, forward)
        flip_weight_between_steps(engine, step)
        return outputs

    set_forward(engine, then_flip)


def forward_of(engine: Any) -> Any:
    return next(stage.compute for stage in engine.executor.stages.values() if isinstance(stage, Body))


def flip_activation(engine: Any, step: int) -> None:
    """Of the forward that another rank repeats."""
    audit, forward = engine.audit, forward_of(engine)

    def then_flip(stage: int, inputs: Any, step: int, number: int) -> Any:
        outputs, op = forward(stage, inputs, step, number), audit._watched
        if op is None or (stage, number - engine.executor.data.first_id) != (op.stage, op.micro_batch):
            return outputs
        set_forward(engine, forward)
        FLIPPED_IN.append(step + 1)
        outputs = outputs.clone()
        flip(outputs)
        return outputs

    set_forward(engine, then_flip)


def flip_repeated_activation(engine: Any, step: int) -> None:
    """Of this rank's repetition of another rank's forward."""
    audit = engine.audit
    finish, forward = audit.finish, forward_of(engine)

    def then_flip(*args: Any) -> Any:
        outputs = forward(*args).clone()
        audit.finish = finish
        set_forward(engine, forward)
        FLIPPED_IN.append(engine.global_steps + 1)
        flip(outputs)
        return outputs

    def finish_with_flip() -> None:
        # The rank whose computation the others repeat repeats nothing in this audit.
        set_forward(engine, then_flip)
        finish()
        set_forward(engine, forward)

    audit.finish = finish_with_flip


def flip_input_gradient(engine: Any, step: int) -> None:
    """Of the watched backward."""
    audit, executor = engine.audit, engine.executor
    handlers = executor.handlers

    def flipping(kind: Any) -> Any:
        def run(buffer_id: int, stage: int, micro_batch: int, slice: int = 0) -> None:
            handlers[kind](buffer_id, stage, micro_batch, slice)
            grads = [t.grad for t in engine.pipe_buffers[buffer_id].inputs or () if t.grad is not None]
            op = audit._watched
            if op is not None and (stage, micro_batch) == (op.stage, op.micro_batch) and grads:
                flip(grads[0])
                executor.handlers = handlers
                FLIPPED_IN.append(engine.global_steps + 1)

        return run

    executor.handlers = {**handlers, **{kind: flipping(kind) for kind in (ds.BackwardPass, BackwardInput)}}


def change_reduced_gradient(engine: Any, step: int) -> None:
    """After the audit of the step, so the weights differ from the next step on."""
    finish = engine.audit.finish

    def then_change() -> None:
        finish()
        parameter = next(iter(engine.module.parameters()))
        # Adam's update may round a small change away.
        engine.update.gradients.get(parameter).view(-1)[0].mul_(-3).add_(1)
        engine.audit.finish = finish
        FLIPPED_IN.append(step + 1)

    engine.audit.finish = then_change


FLIPS: dict[str, Callable[[Any, int], None]] = {
    "weight between steps": flip_weight_between_steps,
    "weight in the step": flip_weight_in_the_step,
    "activation": flip_activation,
    "repeated activation": flip_repeated_activation,
    "input gradient": flip_input_gradient,
    "reduced gradient": change_reduced_gradient,
}


def find(rank: int, schedule: str, pipeline: int, zero: int, flipped: str, faulty: int) -> Any:
    """(step of the alarm, ranks that it names, steps of the flips on this rank)."""
    FLIPPED_IN.clear()
    engine, step = make_engine(schedule, pipeline, zero, 1), 0
    try:
        for step in range(1, STEPS + 1):
            if step == FAULT_STEP and rank == faulty:
                FLIPS[flipped](engine, step)
            engine.train_batch()
    except CorruptionError as error:
        assert error.reported_by == 0 and engine.audit.clean == step - 1
        return step, tuple(error.ranks), tuple(FLIPPED_IN)
    finally:
        engine.transport.close()
    return None, (), tuple(FLIPPED_IN)


@pytest.mark.parametrize(
    ("job", "flipped"), covering(product(["1f1b x 2", "bitpipe", "bitpipe_zb", "slices"], FLIPS), 1)
)
def test_a_flipped_bit_is_found_in_the_audited_step(ranks: Ranks, job: str, flipped: str) -> None:
    schedule, pipeline = JOBS[job]
    # Ranks 0 and 1 of two data-parallel pipelines have only the first stage, whose inputs have no gradients.
    first_stage_only = (0, 1) if pipeline == 2 and flipped == "input gradient" else ()
    for faulty in [rank for rank in (range(4) if EVERYTHING else (1, 2)) if rank not in first_stage_only]:
        results = ranks(4).run(find, schedule, pipeline, 0, flipped, faulty)
        ((step, named),) = {(step, named) for step, named, _ in results}
        assert {step} == {step for _, _, flips in results for step in flips}
        # Two copies with different weights do not show which one is right, and a changed gradient changes the norm
        # by which all are clipped.
        both = flipped in ("weight between steps", "reduced gradient")
        assert faulty in named and (both or len(named) == 1)


class Spectral(Block):
    """With buffers that a forward reads and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + self.calls))


class Attribute(Block):
    """Its forwards differ through an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.number = getattr(self, "number", 0) + 1
        return super().forward(x * self.number)


class Reentrant(Block):
    """Its backward cannot be repeated alone."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class InPlace(Block):
    """It changes its input in place, which at the first layer is the data."""

    def forward(self, x: Tensor) -> Tensor:
        x += super().forward(x.clone())
        return x.mul_(0.9)


class Padded(Block):
    """Its output is a part of a wider tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(super().forward(x), (0, 1))[:, :-1]


class Expanded(Block):
    """All samples of its output share their memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:1].expand(len(x), -1)


class Strided(Block):
    """It rounds by the strides of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + 0.1 * x.stride(0) / WIDTH))


def audit_views(rank: int, layer: type[Block]) -> int:
    """Return the last clean step of 6, with both stages on a device."""
    layers = [Block, Block, Block, layer, Strided, Block, Block, Block]
    engine = make_engine("zb_v", 1, 0, 1, layers=layers)
    for _ in range(6):
        engine.train_batch()
    engine.transport.close()
    return engine.audit.clean


@pytest.mark.parametrize("layer", [Padded, Expanded])
def test_inputs_are_repeated_with_their_strides(ranks: Ranks, layer: type[Block]) -> None:
    assert ranks(1).run(audit_views, layer) == [6]


def audit_layers(
    rank: int, schedule: str, pipeline: int, layer: type[Block], steps: int, place: int = 5
) -> Any:
    """(steps, error type and named rank or layer) of a run in which layer 5 is another one."""
    layers = [Block] * place + [layer] + [Block] * (7 - place)
    engine = make_engine(schedule, pipeline, 0, 1, layers=layers)
    try:
        for _ in range(steps):
            engine.train_batch()
    except (ConfigError, CorruptionError) as error:
        return type(error), [name for name in ("layer 5", layer.__name__) if name in str(error)]
    finally:
        engine.transport.close()
    return engine.audit.clean


@pytest.mark.parametrize("job", ["1f1b x 2", "bitpipe"])
def test_state_of_a_layer_is_no_fault_of_a_host(ranks: Ranks, job: str) -> None:
    for layer in (Spectral, Reentrant):
        assert ranks(4).run(audit_layers, *JOBS[job], layer, 16) == [16] * 4
    assert ranks(4).run(audit_layers, *JOBS[job], InPlace, 16, 0) == [16] * 4
    assert (
        ranks(4).run(audit_layers, *JOBS[job], Attribute, STEPS)
        == [(ConfigError, ["layer 5", "Attribute"])] * 4
    )


def test_checksum_sees_every_single_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool):
        tensor = torch.zeros(37, dtype=dtype)
        bits = tensor.view(torch.uint8)
        before = tensor_checksum([tensor])
        for index in range(len(bits)):
            for bit in range(1 if dtype == torch.bool else 8):
                bits[index] ^= 1 << bit
                assert tensor_checksum([tensor]) != before
                bits[index] ^= 1 << bit
        assert tensor_checksum([tensor]) == before
    ones = torch.ones(3)
    assert tensor_checksum([]) == tensor_checksum([torch.zeros(0)]) == 0
    assert tensor_checksum([ones, 2 * ones]) != tensor_checksum([2 * ones, ones])
    large = torch.zeros(3 << 20)
    first = tensor_checksum([large])
    large[5] = 1e-30
    assert tensor_checksum([large]) != first == tensor_checksum([torch.zeros(3 << 20)])


def test_forward_ranks_cannot_be_audited() -> None:
    job = {
        "train_batch_size": 8,
        "ds_ext": {"schedule": "fbd", "pipeline_parallel_size": 2, "audit_interval": 5},
    }
    with pytest.raises(ConfigError, match=r"^audit_interval: .*5 .*fbd"):
        make_job_plan(load_config(job), 4)
