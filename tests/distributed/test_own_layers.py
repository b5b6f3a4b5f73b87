"""What a user's own layers may do: branch by their data, pass complex numbers on, be many micro-batches in bf16."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import ds_ext
from ds_ext.engine import weight_decay_groups
from ds_ext.engine.weights.norm import clip_grad_norm
from ds_ext.errors import ConfigError, TransportError
from ds_ext.tensor_parallel import ColumnParallelLinear, create_tensor_parallel
from tests.losses import learned
from tests.plans import batch_of
from tests.precisions import needs
from tests.ranks import RankPool, Ranks

STEPS, LR = 3, 0.1


def job(schedule: str, gas: int, **sections: Any) -> dict[str, Any]:
    section = {"schedule": schedule, "pipeline_parallel_size": 2}
    return {
        **batch_of(schedule, gas),
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **sections,
        "ds_ext": section | sections.get("ds_ext", {}),
    }


class Batches:
    """Micro-batches that are a function of (step, micro-batch)."""

    def __init__(self, function: Callable[[int, int], tuple[Tensor, Tensor]]) -> None:
        self.function, self.step = function, 0

    def get(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        return self.function(self.step, micro_batch)

    def advance(self, micro_batches: int) -> None:
        self.step += 1


def build(layers: list[Any], config: dict[str, Any], loss_fn: Any = nn.functional.mse_loss) -> Any:
    model = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = ds_ext.initialize(model=model, config=config, model_parameters=model.parameters())
    return engine


def in_one_process(layers: list[Any], function: Any, micro_batches: int) -> list[float]:
    modules = []
    for index, spec in enumerate(layers):
        torch.manual_seed(1234 + index)  # as the pipeline seeds each layer
        modules.append(spec.build() if isinstance(spec, LayerSpec) else spec)
    chain = nn.Sequential(*modules)
    optimizer, losses = torch.optim.SGD(chain.parameters(), lr=LR), []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = []
        for j in range(micro_batches):
            x, y = function(step, j)
            loss = nn.functional.mse_loss(chain(x), y) / micro_batches
            loss.backward()
            parts.append(loss.item())
        optimizer.step()
        losses.append(sum(parts))
    return learned(losses)


# --- parameters that one replica uses and the other does not ---


class Either(nn.Module):
    """Another layer for positive inputs than for negative ones, of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.positive(x) if float(x.detach().sum()) > 0 else self.negative(x)


def one_sign_a_pipe(step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    x = torch.sin(torch.arange(8.0).view(2, 4) * (10 * step + micro_batch + 1)).abs()
    return (-x if micro_batch < 2 else x), x.square()


def branching() -> list[Any]:
    return [LayerSpec(Either), *(LayerSpec(nn.Linear, 4, 4) for _ in range(3))]


def train_branching(rank: int) -> dict[tuple[int, bool], list[float]]:
    found = {}
    for zero in (0, 1):
        for eager in (True, False):
            sections = {"zero_optimization": {"stage": zero}, "ds_ext": {"eager_gradient_sync": eager}}
            engine = build(branching(), job("bitpipe", 2, **sections))
            batches = Batches(one_sign_a_pipe)
            found[zero, eager] = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    return found


def test_replicas_that_use_other_parameters(ranks2: RankPool) -> None:
    expected = in_one_process(branching(), one_sign_a_pipe, 4)
    for losses in ranks2.run(train_branching)[0].values():
        assert losses == pytest.approx(expected, rel=1e-5)


# --- complex activations ---


class ToWaves(nn.Module):
    """(rows, 4) floats to (the same, (rows, 4) complex numbers)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.angle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), torch.polar(torch.ones_like(x), self.angle(x))


class FromWaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, waves = pair
        return self.linear(x * waves.real + waves.imag)


def waves() -> list[Any]:
    return [LayerSpec(ToWaves), LayerSpec(FromWaves)]


class ComplexLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.polar(torch.ones_like(x), x)).abs()


class Queries(nn.Module):
    """Decoder layer that adds its queries to a projection, and ends with an in-place operation."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.linear = nn.Embedding(2, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh_(self.linear(x).unsqueeze(0) + self.queries.weight.unsqueeze(0))[0]


class Counted(nn.Module):
    """Subtracts its number of forwards from its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: Tensor
        self.register_buffer("forwards", torch.zeros(()))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.linear(x.sub_(0.01 * self.forwards.clone()))


def plain_numbers(step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    x = torch.sin(torch.arange(8.0).view(2, 4) * (10 * step + micro_batch + 1))
    return x, x.square()


def train_waves(rank: int) -> list[float]:
    engine, batches = build(waves(), job("1f1b", 4)), Batches(plain_numbers)
    return [float(engine.train_batch(batches)) for _ in range(STEPS)]


def test_gradients_of_complex_activations(ranks2: RankPool) -> None:
    expected = in_one_process(waves(), plain_numbers, 4)
    assert ranks2.run(train_waves)[0] == pytest.approx(expected, rel=1e-5)


def counted() -> list[Any]:
    return [LayerSpec(nn.Linear, 4, 4) if i % 2 else LayerSpec(Counted) for i in range(4)]


OWN_LAYERS: dict[str, Callable[[], list[Any]]] = {
    "complex weights": lambda: [LayerSpec(ComplexLinear) for _ in range(4)],
    "queries": lambda: [LayerSpec(Queries) for _ in range(4)],
    "counted": counted,
}


def train_own(rank: int, name: str, schedule: str) -> list[float]:
    micro_batches = 2 if schedule.startswith("bitpipe") else 4
    engine, batches = build(OWN_LAYERS[name](), job(schedule, micro_batches)), Batches(plain_numbers)
    return [float(engine.train_batch(batches)) for _ in range(STEPS)]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [(name, schedule) for name in OWN_LAYERS for schedule in ("1f1b", "zb_v", "zb_h1")]
    + [("complex weights", "bitpipe"), ("complex weights", "fbd"), ("queries", "bitpipe_zb")],
)
def test_own_layers_train_as_in_one_process(ranks: Ranks, name: str, schedule: str) -> None:
    expected = in_one_process(OWN_LAYERS[name](), plain_numbers, 4)
    pool = ranks(4 if schedule == "fbd" else 2)
    assert pool.run(train_own, name, schedule)[0] == pytest.approx(expected, rel=1e-5)


class DoubleLinear(nn.Module):
    """Linear layer with fp64 weights between fp32 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.double()).to(x.dtype)


def doubles() -> list[Any]:
    return [LayerSpec(DoubleLinear if i % 2 else nn.Linear, *(() if i % 2 else (4, 4))) for i in range(4)]


def train_doubles(rank: int) -> list[float]:
    engine = build(doubles(), job("bitpipe", 2, ds_ext={"eager_gradient_sync": False}))
    batches = Batches(plain_numbers)
    return [float(engine.train_batch(batches)) for _ in range(STEPS)]


def test_a_reduction_at_the_end_of_a_step_includes_fp64(ranks2: RankPool) -> None:
    expected = in_one_process(doubles(), plain_numbers, 4)
    assert ranks2.run(train_doubles)[0] == pytest.approx(expected, rel=1e-5)


def clip_doubles(rank: int) -> float:
    """Clip the gradient of a parameter on two ranks. Returns the largest relative error."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(100, dtype=torch.float64))
    weight.grad = torch.randn_like(weight)
    exact = weight.grad / (2**0.5 * weight.grad.norm() + 1e-6)  # torch adds 1e-6
    clip_grad_norm([weight], 1.0, tensor_rank=0, model_group=None)
    return float((weight.grad / exact - 1).abs().max())


def test_gradients_of_fp64_are_clipped_in_fp64(ranks2: RankPool) -> None:
    assert max(ranks2.run(clip_doubles)) < 1e-12


def norm_of_halves(rank: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the norm over two ranks of gradients in half precision and of one in fp32, and what it must be."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.zeros(1000, dtype=dtype)), nn.Parameter(torch.zeros(7))]
    for weight in weights:
        weight.grad = (4000 * torch.randn(weight.shape)).to(weight.dtype)
    exact = 2**0.5 * torch.cat([weight.grad.double() for weight in weights]).norm()  # pyright: ignore
    return clip_grad_norm(weights, 0.0, tensor_rank=0, model_group=None), float(exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_are_fp32(ranks2: RankPool, dtype: torch.dtype) -> None:
    for norm, exact in ranks2.run(norm_of_halves, dtype):
        assert exact > torch.finfo(torch.float16).max and norm == pytest.approx(exact, rel=1e-6)


def frozen_group(rank: int, zero: int) -> tuple[list[float], bool]:
    """Train with a group of frozen parameters. Returns the losses, and whether one of these moved."""
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    settings = job("1f1b", 2, zero_optimization={"stage": zero})
    model = ds_ext.PipelineModule(layers, settings, loss_fn=nn.functional.mse_loss)
    frozen = [p.requires_grad_(False) for p in model.parameters() if p.dim() == 1]
    groups = [{"params": [p for p in model.parameters() if p.requires_grad]}, {"params": frozen}]
    engine, *_ = ds_ext.initialize(model=model, model_parameters=groups)
    before, batches = [p.clone() for p in frozen], Batches(plain_numbers)
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    assert len(engine.get_lr()) == 2
    return losses, not all(map(torch.equal, frozen, before))


def test_a_group_of_frozen_parameters_does_not_move(ranks2: RankPool) -> None:
    plain, sharded = ranks2.run(frozen_group, 0), ranks2.run(frozen_group, 1)
    for (losses, moved), (others, also_moved) in zip(plain, sharded, strict=True):
        assert losses == pytest.approx(others, rel=1e-5) and not (moved or also_moved)


class FrozenBias(nn.Linear):
    """Layer whose bias is frozen."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.bias.requires_grad_(False)


def train_frozen_biases(rank: int, overlap: bool) -> list[float]:
    section = {"overlap_across_steps": overlap}
    config = job("interleaved", 2, zero_optimization={"stage": 1}, ds_ext=section)
    engine = build([LayerSpec(FrozenBias) for _ in range(4)], config)
    batches = Batches(plain_numbers)
    return [float(engine.train_batch(batches)) for _ in range(STEPS)]


def test_frozen_parameters_have_no_group_if_gathers_overlap(ranks: Ranks) -> None:
    assert ranks(4).run(train_frozen_biases, True) == ranks(4).run(train_frozen_biases, False)


class ToList(nn.Linear):
    def forward(self, input: Tensor) -> list[Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [super().forward(input), input]


class FromList(nn.Linear):
    def forward(self, input: list[Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(input[0] + input[1])


def lists() -> list[Any]:
    return [LayerSpec(layer, 4, 4) for layer in (ToList, FromList)]


def train_recomputed_lists(rank: int) -> list[float]:
    engine = build(lists(), job("1f1b", 4, pipeline={"activation_checkpoint_interval": 1}))
    batches = Batches(plain_numbers)
    return [float(engine.train_batch(batches)) for _ in range(STEPS)]


def test_recomputed_layers_may_return_lists(ranks2: RankPool) -> None:
    expected = in_one_process(lists(), plain_numbers, 4)
    assert ranks2.run(train_recomputed_lists)[0] == pytest.approx(expected, rel=1e-5)


# --- ranks with other parameters ---


def train_decay_groups(rank: int, zero: int) -> list[float]:
    """Losses and norm of two parameter groups on the first stage and one on the second, with clipped gradients."""
    config = job("1f1b", 4, zero_optimization={"stage": zero}, gradient_clipping=0.1)
    layers = [LayerSpec(nn.Linear, 4, 4, bias) for bias in (True, False)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    groups = weight_decay_groups(model)
    assert [len(group["params"]) for group in groups] == [1, 1 - rank]
    engine, *_ = ds_ext.initialize(model=model, config=config, model_parameters=groups)
    batches = Batches(plain_numbers)
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    return [*losses, float(engine.get_global_grad_norm())]


def test_a_group_may_be_empty_on_a_rank(ranks2: RankPool) -> None:
    whole, *sharded = ranks2.run(train_decay_groups, 0)[0], *ranks2.run(train_decay_groups, 1)
    for numbers in sharded:
        assert numbers == pytest.approx(whole, rel=1e-5)


def train_twice(rank: int, sections: dict[str, Any]) -> list[float]:
    """Losses and norm of two tensor-parallel ranks, the second of which counts no parameter."""
    sizes = {"pipeline_parallel_size": 1, "tensor_parallel_size": 2}
    engine = build([LayerSpec(nn.Linear, 4, 4)], job("1f1b", 4, ds_ext=sizes, **sections))
    batches = Batches(bf16_numbers if sections else plain_numbers)
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    return [*losses, float(engine.get_global_grad_norm())]


@needs("bf16")
def test_a_rank_may_count_no_parameter_in_the_norm_of_bf16(ranks2: RankPool) -> None:
    [whole, _] = ranks2.run(train_twice, {})
    for half in ranks2.run(train_twice, {"bf16": {"enabled": True}}):
        assert half == pytest.approx(whole, rel=0.05)


def warnings_about_layers(rank: int, is_sharded: bool) -> int:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # pyright: ignore[reportAttributeAccessIssue]
    logging.getLogger("ds_ext.engine.module").addHandler(handler)
    tp = create_tensor_parallel([[0, 1]])
    sharded = LayerSpec(ColumnParallelLinear, 4, 8, tp, init=nn.init.zeros_)
    layer = sharded if is_sharded else LayerSpec(nn.Linear, 4, 4)
    config = job("1f1b", 4, ds_ext={"pipeline_parallel_size": 1, "tensor_parallel_size": 2})
    ds_ext.PipelineModule([layer], config, loss_fn=nn.functional.mse_loss)
    logging.getLogger("ds_ext.engine.module").removeHandler(handler)
    return len(records)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_tensor_parallel_ranks_that_share_nothing_are_told(ranks2: RankPool, is_sharded: bool) -> None:
    assert ranks2.run(warnings_about_layers, is_sharded) == [not is_sharded, 0]


# --- bf16 ---


def repeated_norms(rank: int) -> list[float]:
    """The gradient norm of one micro-batch, repeated 4 and 512 times."""
    norms = []
    for gas in (4, 512):
        sections = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
        layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
        engine = build(layers, job("1f1b", gas, **sections))
        x, y = (t.bfloat16() for t in plain_numbers(0, 0))
        engine.train_batch(Batches(lambda step, j, x=x, y=y: (x, y)))
        norms.append(float(engine.get_global_grad_norm()))
    return norms


@needs("bf16")
def test_bf16_gradients_of_many_micro_batches_are_summed_in_fp32(ranks2: RankPool) -> None:
    few, many = ranks2.run(repeated_norms, timeout_s=120)[0]
    assert many == pytest.approx(few, rel=1e-2)  # summed in bf16 it would be half


def bf16_numbers(step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    x, y = plain_numbers(step, micro_batch)
    return x.bfloat16(), y.bfloat16()


def train_queries_in_bf16(rank: int, schedule: str) -> list[float]:
    engine = build(OWN_LAYERS["queries"](), job(schedule, 4, bf16={"enabled": True}))
    batches = Batches(bf16_numbers)
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    return [*losses, float(engine.get_global_grad_norm())]


@needs("bf16")
def test_bf16_gradients_that_share_memory(ranks2: RankPool) -> None:
    """Autograd may keep one tensor as the gradient of several parameters."""
    whole, split = (ranks2.run(train_queries_in_bf16, schedule)[0] for schedule in ("1f1b", "zb_v"))
    assert split == pytest.approx(whole, rel=1e-5)


# --- what cannot be ---


def refusals(rank: int) -> list[str]:
    def said(action: Callable[[], Any]) -> str:
        with pytest.raises(ConfigError) as caught:
            action()
        return str(caught.value)

    def layers() -> list[Any]:
        return [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]

    engine, config = build(layers(), job("1f1b", 2)), job("1f1b", 2)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*plain_numbers(0, 0)))
    found = [said(lambda: engine.train_batch(data))]
    found.append(said(lambda: ds_ext.PipelineModule(layers(), config, num_stages=1)))
    return found


def test_one_clear_error(ranks2: RankPool) -> None:
    first, _ = ranks2.run(refusals)
    assert "data_iter: " in first[0] and "DataLoader" in first[0]
    assert "num_stages: " in first[1]


def refused_doubles(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"^zero_optimization.stage: .*linear.weight.*float64"):
        build(doubles(), job("bitpipe", 2, zero_optimization={"stage": 1}))


def test_fp64_weights_are_refused_with_zero(ranks2: RankPool) -> None:
    ranks2.run(refused_doubles)


@needs("bf16")
def test_bf16_casts_fp64_weights(ranks2: RankPool) -> None:
    ranks2.run(train_cast_doubles)


def train_cast_doubles(rank: int) -> None:
    layers = [LayerSpec(nn.Linear, 4, 4, dtype=torch.float64) for _ in range(2)]
    engine = build(layers, job("1f1b", 2, bf16={"enabled": True}))
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}


def refused_complex_weights(rank: int, sections: dict[str, Any]) -> None:
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(ComplexLinear)]
    with pytest.raises(ConfigError, match=r"^zero_optimization.stage: .*linear.weight.*complex64"):
        build(layers, job("1f1b", 2, **sections))


@pytest.mark.parametrize(
    "sections",
    [{"zero_optimization": {"stage": 1}}, pytest.param({"bf16": {"enabled": True}}, marks=needs("bf16"))],
    ids=["zero", "bf16"],
)
def test_complex_weights_are_refused_with_zero(ranks2: RankPool, sections: dict[str, Any]) -> None:
    ranks2.run(refused_complex_weights, sections)


def vector_loss(rank: int) -> str:
    """The error of a step whose loss function gives one number a row."""
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
    engine = build(layers, job("1f1b", 2), lambda out, target: (out - target).mean(1))
    with pytest.raises((ConfigError, TransportError)) as caught:
        engine.train_batch(Batches(plain_numbers))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_loss_of_several_numbers(ranks: Ranks) -> None:
    pool = ranks(2)
    _, last = pool.run(vector_loss)
    pool.close()  # its messages are left half-way
    assert last.startswith("ConfigError") and "loss_fn" in last and "(2,)" in last


def refused_for_rank_0(rank: int, section: str) -> tuple[str, int | None]:
    """The error of initialize(), and who reports it, when the device of rank 0 alone has no half precision."""
    config = job("1f1b", 2, **{section: {"enabled": True}})
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
        for check in ("is_bf16_supported", "is_fp16_supported"):
            patch.setattr(get_accelerator(), check, lambda: rank != 0)
        ds_ext.initialize(model=model, config=config, model_parameters=model.parameters())
    return str(caught.value), caught.value.reported_by


@pytest.mark.parametrize("section", ["bf16", "bfloat16", "fp16"])
def test_a_precision_that_one_device_lacks_is_refused_on_every_rank(ranks2: RankPool, section: str) -> None:
    (error, reporter), other = ranks2.run(refused_for_rank_0, section)
    assert other == (error, reporter) and reporter == 0
    assert error.startswith(f"{section}.enabled: ") and "cpu" in error and "fp32" in error
