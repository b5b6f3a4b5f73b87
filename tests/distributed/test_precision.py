"""bf16 and fp16: every schedule gives the losses of 1F1B within rounding, and an overflow skips a step everywhere.

Weights in half precision without a section in the JSON train as in one process.
"""

from __future__ import annotations

import contextlib
import io
from itertools import product
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ds_ext.engine import PipelineEngine, PipelineModule, initialize
from ds_ext.engine.batches import MicroBatches
from ds_ext.errors import ConfigError
from ds_ext.recipes.training.arguments import parse
from tests.engine_runs import MODEL, Job, build, train
from tests.losses import learned
from tests.precisions import needs
from tests.ranks import RankPool, Ranks
from tests.reference import random_batches
from tests.selection import covering

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
# Losses of about 4.6 after a few steps: bf16 has 8 bits, and gradients of micro-batches are summed in other orders.
TOLERANCE = 1e-3


def json(precision: str, zero: int, **section: Any) -> dict[str, Any]:
    return {
        precision: {"enabled": True, **section},
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6},
        **ADAM,
    }


@pytest.mark.parametrize(
    ("precision", "zero"),
    [pytest.param(name, zero, marks=needs(name)) for name in ("bf16", "fp16") for zero in (0, 1)],
)
def test_schedules_agree_in_half_precision(ranks: Ranks, precision: str, zero: int) -> None:
    scale = {"initial_scale_power": 8} if precision == "fp16" else {}
    results = [
        ranks(2).run(
            train, Job(schedule, 2, 1, 1, 4, MODEL, steps=6, deepspeed=json(precision, zero, **scale))
        )[0]
        for schedule in ("1f1b", "bitpipe", "bitpipe_zb")
    ]
    for result in results[1:]:
        assert result["losses"] == pytest.approx(results[0]["losses"], rel=TOLERANCE)
        assert result["norms"] == pytest.approx(results[0]["norms"], rel=10 * TOLERANCE)
    # The loss scale, whatever it is, leaves the gradient as it is without one.
    whole = ranks(2).run(train, Job("1f1b", 2, 1, 1, 4, MODEL, steps=6, deepspeed=ADAM))[0]
    learned(whole["losses"])
    assert results[0]["norms"] == pytest.approx(whole["norms"], rel=0.05)
    # Halves of a backward are the whole, whatever the precision.
    assert results[1]["losses"] == pytest.approx(results[2]["losses"], rel=1e-5)


def train_with_overflow(rank: int, job: Job) -> tuple[list[int], list[float]]:
    """(Skipped steps, loss scale) after each step."""
    engine, _ = build(job)
    data = random_batches(job.model, 1, job.micro_batches)[0]
    skipped, scales = [], []
    for _ in range(job.steps):
        engine.train_batch(iter(data))
        skipped.append(engine.skipped_steps)
        scales.append(float(engine.optimizer.loss_scale))
    engine.transport.close()
    return skipped, scales


@needs("fp16")
@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe_zb"])
def test_an_overflow_anywhere_skips_the_step_everywhere(ranks2: RankPool, schedule: str) -> None:
    """A loss scale of 2^40 overflows at first; every rank skips the same steps, and then all train."""
    config = json("fp16", 1, initial_scale_power=40, hysteresis=1)
    results = ranks2.run(train_with_overflow, Job(schedule, 2, 1, 1, 4, MODEL, steps=30, deepspeed=config))
    assert results[0] == results[1]
    skipped, scales = results[0]
    assert 1 <= skipped[-1] < 30 and skipped[-1] == skipped[-2]
    assert scales[-1] == 2.0 ** (40 - skipped[-1])


class Branch(nn.Module):
    """Layer that uses a weight only for positive samples."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + self.sometimes(x) if x.sum() > 0 else self.always(x)


def step_with_a_branch(rank: int) -> tuple[list[list[float]], float]:
    """Return the weights and the norm of a step in which only rank 0 uses one of the weights."""
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "bf16": {"enabled": True},
    }
    model = PipelineModule([LayerSpec(Branch)], config, num_stages=1, loss_fn=nn.functional.mse_loss)
    engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
    assert engine.update.reduction is not None
    sign = 1 - 2 * engine.mpu.get_data_parallel_rank()
    sample = torch.full((1, 2), float(sign), dtype=torch.bfloat16)
    engine.train_batch(iter([(sample, -sample)] * 2))
    norm = engine.get_global_grad_norm()
    assert norm is not None
    return [parameter.flatten().tolist() for parameter in model.parameters()], float(norm)


@needs("bf16")
def test_a_weight_that_one_replica_uses_counts_on_both(ranks2: RankPool) -> None:
    first, second = ranks2.run(step_with_a_branch)
    assert first == second


def norm_of_two_replicas(rank: int, eager: bool, keys: dict[str, Any]) -> float:
    """Return the norm of a step in which the gradient of the only weight is 1 on rank 0, and 2^-9 on rank 1."""
    config = {
        **{"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}},
        **{**ADAM, **keys, "gradient_clipping": 0.0, "ds_ext": {"eager_gradient_sync": eager}},
    }
    layers = [LayerSpec(nn.Linear, 1, 1, bias=False)]
    model = PipelineModule(
        layers, config, num_stages=1, loss_fn=lambda outputs, factor: (outputs * factor).mean()
    )
    engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
    assert (engine.update.reduction is not None) == eager
    factor = torch.full((1, 1), 2.0 ** (-9 * engine.mpu.get_data_parallel_rank()), dtype=torch.bfloat16)
    engine.train_batch(iter([(torch.ones_like(factor), factor)]))
    norm = engine.get_global_grad_norm()
    assert norm is not None
    return float(norm)


@needs("bf16")
@pytest.mark.parametrize("eager", [True, False])
def test_gradients_are_reduced_in_the_communication_data_type(ranks2: RankPool, eager: bool) -> None:
    """bf16 keeps 1 of 1 + 2^-9; the flag is Megatron's."""
    words = ["--lr", "1", "--micro-batch-size", "1", "--global-batch-size", "2", "--bf16"]
    key = "communication_data_type"
    for flags, total in (([], 1 + 2**-9), (["--grad-reduce-in-bf16"], 1)):
        config = parse("train_gpt.py", [*words, *flags])[1].deepspeed
        keys = {key: config[key]} if key in config else {}
        assert ranks2.run(norm_of_two_replicas, eager, keys) == pytest.approx([total / 2] * 2, rel=1e-6)


def norm_of_many(rank: int, micro_batches: int) -> float:
    """Return the norm of a step in which the gradient of the only weight is 1 in every micro-batch."""
    config = {
        **{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches},
        **{**ADAM, "bf16": {"enabled": True}, "gradient_clipping": 0.0},
    }
    model = PipelineModule(
        [LayerSpec(nn.Linear, 1, 1, bias=False)],
        config,
        num_stages=1,
        loss_fn=lambda outputs, _: outputs.mean(),
    )
    engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
    sample = torch.ones(1, 1, dtype=torch.bfloat16)
    engine.train_batch(iter([(sample, sample)] * micro_batches))
    norm = engine.get_global_grad_norm()
    assert norm is not None
    return float(norm)


@needs("bf16")
def test_gradients_of_many_micro_batches_are_summed_in_fp32(ranks2: RankPool) -> None:
    """A sum of ones in bf16 stops at 256."""
    assert ranks2.run(norm_of_many, 1024) == pytest.approx([1.0] * 2, rel=1e-6)


# --- weights in half precision, without a section in the JSON ---

WIDTH, PER_STEP, STEPS = 8, 4, 5
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ADAMW: dict[str, Any] = {"lr": 2e-2, "eps": 1e-4, "weight_decay": 0.1}
WEIGHTS = {  # dtypes of the linear layer and of the norm of each layer
    "bf16": [(BF16, BF16)] * 8,
    "fp16": [(FP16, FP16)] * 8,
    "fp32 norms": [(BF16, FP32)] * 8,
    "one fp32": [*[(BF16, BF16)] * 3, (BF16, FP32), *[(BF16, BF16)] * 4],
    "bf16 behind fp32": [*[(FP32, FP32)] * 4, *[(BF16, BF16)] * 4],
    "fp16 behind fp32": [*[(FP32, FP32)] * 4, *[(FP16, FP16)] * 4],
    "fp32 behind fp16": [*[(FP16, FP16)] * 4, *[(FP32, FP32)] * 4],
    "bf16 behind fp16": [*[(FP16, FP16)] * 4, *[(BF16, BF16)] * 4],
}
LAYOUTS = {
    "1f1b": ("1f1b", 2),
    "two replicas": ("1f1b", 1),
    "bitpipe": ("bitpipe", 2),
    "zb_v": ("zb_v", 2),
    "fbd": ("fbd", 2),
}


WIDENED = ", widened"


class Cast(nn.Module):
    """Layer that casts its input to its own dtypes."""

    def __init__(self, linear: torch.dtype, norm: torch.dtype) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, dtype=linear), nn.LayerNorm(WIDTH, dtype=norm)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x.to(self.norm.weight.dtype))
        return x + torch.tanh(self.linear(normed.to(self.linear.weight.dtype)))


def cast_layers(weights: str) -> list[nn.Module]:
    torch.manual_seed(3)
    layers: list[nn.Module] = [Cast(*dtypes) for dtypes in WEIGHTS[weights.removesuffix(WIDENED)]]
    if weights.endswith(WIDENED):  # the same values; layers of another dtype would draw others
        for layer in layers:
            for module in layer.children():
                module.float()
    return layers


def mean_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs.float(), labels)


def samples_of_halves() -> TensorDataset:
    x = torch.randn(2 * PER_STEP * STEPS, WIDTH, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, 0.5 * torch.roll(x, 1, 1))


def halves_engine(
    weights: str, zero: int, layout: str, by_dtype: bool, loss_fn: Any = mean_square, **keys: Any
) -> PipelineEngine:
    schedule, pp = LAYOUTS[layout]
    config = {
        "train_batch_size": 2 * PER_STEP,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        **keys,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": pp, **keys.get("ds_ext", {})},
    }
    layers = cast_layers(weights)
    model = PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    parameters: Any = model.parameters()
    if by_dtype:
        parameters = [
            {"params": [p for p in model.parameters() if p.dtype == dtype]} for dtype in (BF16, FP32)
        ]
    data = samples_of_halves()
    engine, *_ = initialize(model=model, model_parameters=parameters, training_data=data, config=config)
    return engine


def train_halves(rank: int, *job: Any, **keys: Any) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and weights."""
    engine = halves_engine(*job, **keys)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(engine.train_batch()))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    layers = [layer for stage in engine.module.stages for layer in engine.module.stage_modules(stage).items()]
    weights = {
        f"{i}.{name}": p.detach().clone() for i, layer in layers for name, p in layer.named_parameters()
    }
    engine.transport.close()
    return losses, norms, weights


def plain_halves(weights: str, zero: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Results of one process. With ZeRO, sums of gradients and the weights of the optimizer are fp32."""
    model = nn.Sequential(*cast_layers(weights))
    parameters = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) if zero else p for p in parameters]
    optimizer = torch.optim.AdamW(masters, **ADAMW)
    data, losses, norms = samples_of_halves(), [], []
    for step in range(STEPS):
        sums, total = [torch.zeros_like(master) for master in masters], 0.0
        for m in range(PER_STEP):
            first = 2 * (PER_STEP * step + m)
            x, y = data[first : first + 2]
            loss = mean_square(model(x), y)
            total += float(loss.detach())
            for gradient, part in zip(sums, torch.autograd.grad(loss / PER_STEP, parameters), strict=True):
                gradient += part.to(gradient.dtype)
        norm = torch.stack([gradient.float().norm() for gradient in sums]).norm()
        for master, gradient in zip(masters, sums, strict=True):
            master.grad = gradient * min(1.0, 1.0 / float(norm + 1e-6))
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master.data)
        losses.append(total / PER_STEP)
        norms.append(float(norm))
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("weights", "zero", "layout"),
    covering(
        product(
            [name for name in WEIGHTS if "fp16" not in name],
            [0, 1],
            [name for name in LAYOUTS if name != "1f1b"],
        ),
        2,
    ),
)
def test_weights_train_in_their_own_dtype(ranks: Ranks, weights: str, zero: int, layout: str) -> None:
    """With ZeRO, a group of the optimizer has one dtype."""
    by_dtype = zero > 0 and weights != "bf16"
    results = ranks(4 if layout == "fbd" else 2).run(train_halves, weights, zero, layout, by_dtype)
    losses, norms, trained = plain_halves(weights, zero)
    assert losses[-1] < 0.8 * losses[0] and min(norms) > 0
    # Without ZeRO, gradients of half precision are summed in half precision, in another order.
    tolerance, atol = (1e-5, 1e-2) if zero else (2e-2, 4e-2)
    for result in results:
        assert result[0] == pytest.approx(losses, rel=tolerance)
        assert result[1] == pytest.approx(norms, rel=tolerance)
        for name, weight in result[2].items():
            assert weight.dtype == trained[name].dtype
            torch.testing.assert_close(weight, trained[name], rtol=0, atol=atol)


def facts_of_halves(rank: int, weights: str, zero: int, keys: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the precision of the run, and the lines of the plan."""
    engine = halves_engine(weights, zero, "1f1b", bool(zero), **keys)
    engine.transport.close()
    return engine.run_facts["precision"], engine.run_facts["plan"].splitlines()


@pytest.mark.parametrize(
    ("weights", "zero", "keys", "words"),
    [
        ("bf16 behind fp32", 0, {}, {"bf16", "fp32", "no"}),
        ("bf16 behind fp32", 1, {}, {"bf16", "fp32"}),
        ("bf16", 0, {"bf16": {"enabled": True}}, set()),
    ],
)
def test_the_plan_has_the_precision_of_weights_without_a_section(
    ranks2: RankPool, weights: str, zero: int, keys: dict[str, Any], words: set[str]
) -> None:
    (precision, plan), _ = ranks2.run(facts_of_halves, weights, zero, keys)
    (model,) = [line for line in plan if line.startswith("model ")]
    assert set(precision.replace(",", "").split()) >= words and ("no" in precision.split()) == ("no" in words)
    assert model.endswith(precision) == bool(words) and (precision == "bf16") != bool(words)


@pytest.mark.parametrize("layout", ["two replicas", "bitpipe"])
def test_fp16_weights_search_their_loss_scale(ranks2: RankPool, layout: str) -> None:
    """ZeRO scales the loss of fp16 weights also without the section "fp16". Skipped steps do not end the run."""
    section = {"max_nonfinite_losses": 1}
    losses, norms, _ = ranks2.run(train_fp16, layout, section)[0]
    assert losses[-1] < 0.8 * losses[0]
    assert all(norm > 0 for norm in norms)


@pytest.mark.parametrize("layout", ["1f1b", "fbd"])
@pytest.mark.parametrize("weights", ["fp16 behind fp32", "fp32 behind fp16"])
def test_a_rank_with_fp32_weights_has_the_loss_scale_of_fp16(ranks: Ranks, weights: str, layout: str) -> None:
    """Without clipping, SGD would show a scale that is not divided out."""
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    keys = {"optimizer": optimizer, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    scaled, whole = (
        ranks(4 if layout == "fbd" else 2).run(
            train_scaled, weights if zero else weights + WIDENED, zero, layout, keys
        )
        for zero in (1, 0)
    )
    learned(whole[0][0])
    for result, expected in zip(scaled, whole, strict=True):
        first = next(number for number, norm in enumerate(result[1]) if 0 < norm < float("inf"))
        assert first < 12, result[1]
        assert result[1][first] == pytest.approx(expected[1][0], rel=1e-2)
        for name, moved in result[2].items():
            torch.testing.assert_close(moved, expected[2][name], rtol=0, atol=2e-3)


def test_fp16_and_bf16_on_different_ranks_are_refused_with_zero(ranks2: RankPool) -> None:
    for error in ranks2.run(refused_halves, "bf16 behind fp16", 1, "1f1b", mean_square, {}):
        assert error.startswith("zero_optimization.stage: ") and "fp16" in error and "bf16" in error


def train_scaled(
    rank: int, weights: str, zero: int, layout: str, keys: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms, and changes of the weights in the first step that changes some."""
    engine = halves_engine(weights, zero, layout, False, **keys)
    layers = [layer for stage in engine.module.stages for layer in engine.module.stage_modules(stage).items()]
    parameters = {f"{i}.{name}": p for i, layer in layers for name, p in layer.named_parameters()}
    before = {name: p.detach().float().clone() for name, p in parameters.items()}
    data = samples_of_halves()
    batch = [data[2 * m : 2 * m + 2] for m in range(PER_STEP)]
    losses, norms, skipped = [], [], True
    while skipped and len(norms) < 20:
        losses.append(float(engine.train_batch(iter(batch))))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        skipped = engine.skipped_steps == len(norms)
    moved = {name: p.detach().float() - before[name] for name, p in parameters.items()}
    losses += [float(engine.train_batch(iter(batch))) for _ in range(3)]
    engine.transport.close()
    return losses, norms, moved


def train_fp16(rank: int, layout: str, section: dict[str, Any]) -> Any:
    return train_halves(rank, "fp16", 1, layout, False, ds_ext=section)


def refused_halves(rank: int, weights: str, zero: int, layout: str, loss_fn: Any, section: Any) -> str:
    """Return the error of the first step, or "" for a step without error."""
    try:
        engine = halves_engine(weights, zero, layout, False, loss_fn, ds_ext=section)
        engine.train_batch()
    except ConfigError as error:
        return str(error)
    engine.transport.close()
    return ""


@pytest.mark.parametrize("layout", ["two replicas", "bitpipe"])
@pytest.mark.parametrize("weights", ["fp32 norms", "one fp32"])
def test_a_group_of_several_dtypes_is_refused_with_zero(ranks2: RankPool, weights: str, layout: str) -> None:
    for error in ranks2.run(refused_halves, weights, 1, layout, mean_square, {}):
        assert error.startswith("zero_optimization.stage: ")
        assert "bfloat16" in error and "float32" in error and ".norm." in error


def without_gradient(outputs: Tensor, labels: Tensor) -> Tensor:
    return mean_square(outputs * 0.0, labels)


def without_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.float().sum() * 0.0


def without_labels(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return outputs.float().sum() * 0.0, 0


without_labels.counts = lambda labels: 0  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.parametrize("layout", ["two replicas", "bitpipe", "zb_v", "fbd"])
def test_a_step_without_gradients_is_refused(ranks: Ranks, layout: str) -> None:
    pool = ranks(4 if layout == "fbd" else 2)
    for zero in (0, 1):
        for error in pool.run(refused_halves, "bf16", zero, layout, without_gradient, {}):
            assert error.startswith("loss_fn: ") and "step 1" in error and "0.linear.bias" in error
    allowed = {"allow_zero_norm": True}
    assert not any(pool.run(refused_halves, "bf16", 1, layout, without_gradient, allowed))
    assert not any(pool.run(refused_halves, "bf16", 1, layout, without_labels, {}))
    assert not any(pool.run(refused_halves, "bf16", 1, layout, without_loss, {}))


# --- bf16 states ---


def printed_while_building(rank: int) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine = halves_engine("bf16", 1, "1f1b", False, bf16={"enabled": True})
    assert isinstance(engine.optimizer, BF16_Optimizer)
    engine.transport.close()
    return printed.getvalue()


@needs("bf16")
def test_the_bf16_optimizer_prints_no_use_of_memory(ranks2: RankPool) -> None:
    assert not any("bf16_optimizer" in text or "MA " in text for text in ranks2.run(printed_while_building))


def train_in_bf16(rank: int, layout: str, section: dict[str, Any], keys: dict[str, Any]) -> Any:
    """Losses, dtypes of the optimizer's states and of its weights, skipped steps with an infinite sample."""
    engine = halves_engine("bf16", 1, layout, False, bf16={"enabled": True, **section}, **keys)
    inner = engine.optimizer.optimizer
    assert isinstance(engine.batches, MicroBatches)
    data = engine.batches.dataset
    assert isinstance(data, TensorDataset)
    data.tensors[0][2 * PER_STEP * 2] = torch.inf  # in the third step
    losses = [float(engine.train_batch()) for _ in range(4)]
    states = {value.dtype for state in inner.state.values() for key, value in state.items() if key != "step"}
    weights = {parameter.dtype for group in inner.param_groups for parameter in group["params"]}
    engine.transport.close()
    return losses, states, weights, engine.skipped_steps


@needs("bf16")
@pytest.mark.parametrize("layout", ["two replicas", "bitpipe", "zb_v"])
def test_keys_of_bf16_have_their_effect(ranks2: RankPool, layout: str) -> None:
    in_bf16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    losses, *dtypes, skipped = ranks2.run(train_in_bf16, layout, in_bf16, {})[0]
    assert dtypes == [{BF16}, {BF16}] and losses[1] < losses[0] and skipped == 1
    losses, *dtypes, skipped = ranks2.run(train_in_bf16, layout, {}, {})[0]
    assert dtypes == [{FP32}, {FP32}] and losses[1] < losses[0] and skipped == 1
    bf16_sums = {"data_types": {"grad_accum_dtype": "bf16"}}
    *_, skipped = ranks2.run(train_in_bf16, layout, {"check_grad_overflow": False}, bf16_sums)[0]
    assert skipped == 0
