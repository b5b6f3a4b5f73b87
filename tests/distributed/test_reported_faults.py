"""Faults of Megatron-LM, torch and other pipelines (docs/deepspeed_issues.md) that no other file tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_ext
from ds_ext.errors import ConfigError
from ds_ext.tensor_parallel import (
    TensorParallel,
    copy_to_tensor_model_parallel_region,
    create_tensor_parallel,
    reduce_from_tensor_model_parallel_region,
)
from tests.decoder_models import config_of, mean_loss, micro_batch, save_decoder
from tests.distributed.test_own_layers import LR, STEPS, Batches, build, in_one_process, job, plain_numbers
from tests.engine_runs import MODEL, SCHEDULES, Job, StepBatches
from tests.engine_runs import build as build_gpt
from tests.losses import learned
from tests.precisions import needs
from tests.ranks import RankPool, Ranks
from tests.reference import random_batches


def micro_batches_of(schedule: str) -> int:
    """Return the accumulation steps of 4 micro-batches of two devices."""
    return 2 if schedule.startswith(("bitpipe", "chimera")) else 4


def losses_of(engine: Any) -> list[float]:
    batches = Batches(plain_numbers)
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    engine.transport.close()
    return losses


# --- a parameter of each head, divided over tensor-parallel ranks (Megatron-LM#7452, #7530) ---

CLIP = 0.05


class Sinks(nn.Module):
    """Linear layer with a factor of each head, of which a rank has some."""

    def __init__(self, tp: TensorParallel, **attributes: Any) -> None:
        super().__init__()
        self.tp, self.linear = tp, nn.Linear(4, 4)
        self.sinks = nn.Parameter(tp.shard(torch.linspace(-1, 2, 4), 0).clone())
        for name, value in attributes.items():
            setattr(self.sinks, name, value)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        before, own = self.tp.rank * len(self.sinks), len(self.sinks)
        product = copy_to_tensor_model_parallel_region(x, self.tp)[:, before : before + own] * self.sinks
        heads = nn.functional.pad(product, (before, 4 - before - own))
        return x + reduce_from_tensor_model_parallel_region(heads, self.tp)


def train_sinks(rank: int, attributes: dict[str, Any], zero: int) -> list[tuple[float, float]]:
    """Return (loss, norm) of the steps."""
    tp = create_tensor_parallel([[0, 1], [2, 3]])
    sections = {"train_batch_size": 8, "gradient_clipping": CLIP, "zero_optimization": {"stage": zero}}
    config = job("1f1b", 4, ds_ext={"tensor_parallel_size": 2}, **sections)
    engine = build([LayerSpec(Sinks, tp, **attributes) for _ in range(4)], config)
    batches = Batches(plain_numbers)
    numbers = [
        (float(engine.train_batch(batches)), float(engine.get_global_grad_norm())) for _ in range(STEPS)
    ]
    engine.transport.close()
    return numbers


def plain_sinks() -> list[tuple[float, float]]:
    layers = []
    for index in range(4):
        torch.manual_seed(1234 + index)
        layers.append(Sinks(TensorParallel()))
    model, numbers = nn.Sequential(*layers), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        pairs = [plain_numbers(step, number) for number in range(4)]
        loss = torch.stack([nn.functional.mse_loss(model(x), y) for x, y in pairs]).mean()
        loss.backward()
        numbers.append((loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))))
        optimizer.step()
        optimizer.zero_grad()
    learned([loss for loss, _ in numbers])
    return numbers


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("tag", ["partition_dim", "model_parallel", "tensor_model_parallel"])
def test_the_norm_counts_all_shards_of_an_own_layer(ranks4: RankPool, tag: str, zero: int) -> None:
    attributes = {"partition_dim": 0, tag: 0 if tag == "partition_dim" else True}
    expected = plain_sinks()
    for numbers in ranks4.run(train_sinks, attributes, zero):
        for found, one in zip(numbers, expected, strict=True):
            assert found == pytest.approx(one, rel=1e-5)


# --- tied weights in parameter groups with different rates (Megatron-LM#4641) ---


def refuse_rates(rank: int, schedule: str, zero: int) -> str:
    """Train the tied weights of the last stage at another rate than those of the first. Return the error."""
    config = job(schedule, 4, zero_optimization={"stage": zero})
    first, last = (TiedLayerSpec("ends", nn.Linear, 4, 4, False) for _ in range(2))
    layers = [first, LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4), last]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    named = dict(model.named_parameters())
    head = [named.pop(name) for name in list(named) if rank == 1 and "ends" in name]
    groups = [{"params": list(named.values()), "name": f"rank {rank}"}]
    groups += [{"params": head, "lr": 2 * LR}] if head else []
    with pytest.raises(ConfigError) as refused:
        ds_ext.initialize(model=model, config=config, model_parameters=groups)
    return str(refused.value)


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 0), ("interleaved", 1)])
def test_the_places_of_a_tie_are_trained_alike(ranks2: RankPool, schedule: str, zero: int) -> None:
    for error in ranks2.run(refuse_rates, schedule, zero):
        assert "ends" in error and '"lr": 0.2' in error


# --- reentrant recomputation in a layer (Automodel#3257) ---


class Recomputed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return checkpoint(super().forward, input, use_reentrant=True)


def recomputed_at(*places: int) -> list[Any]:
    return [LayerSpec(Recomputed if index in places else nn.Linear, 4, 4) for index in range(4)]


def train_recomputed(rank: int, schedule: str, places: tuple[int, ...]) -> list[float]:
    return losses_of(build(recomputed_at(*places), job(schedule, micro_batches_of(schedule))))


@pytest.mark.parametrize("places", [(0,), (1, 2), (3,)])
@pytest.mark.parametrize("schedule", ["zb_v", "bitpipe_zb"])
def test_layers_may_recompute_themselves(ranks2: RankPool, schedule: str, places: tuple[int, ...]) -> None:
    """A first layer whose inputs need no gradient is not trained, as in torch."""
    expected = in_one_process(recomputed_at(*places), plain_numbers, 4)
    assert ranks2.run(train_recomputed, schedule, places)[0] == pytest.approx(expected, rel=1e-5)


# --- an own Function with a frozen weight (pytorch#166577) ---


class ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, scale)
        return x @ weight.t() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        [grad], (x, weight, scale) = grads, ctx.saved_tensors
        needed = ctx.needs_input_grad
        return (
            (grad * scale) @ weight if needed[0] else None,
            (grad * scale).t() @ x if needed[1] else None,
            (grad * (x @ weight.t())).sum(0) if needed[2] else None,
        )


class Twice(nn.Module):
    """Uses both weights twice; one of them is frozen."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(nn.Linear(4, 4).weight.detach()), nn.Parameter(torch.ones(4))
        self.get_parameter(frozen).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = ScaledProduct.apply(x, self.weight, self.scale)
        outer: Any = ScaledProduct.apply(torch.tanh(inner), self.weight, self.scale)
        return outer


def twice(frozen: str) -> list[Any]:
    return [LayerSpec(Twice, frozen) for _ in range(4)]


def train_twice(rank: int, schedule: str, frozen: str, zero: int) -> list[float]:
    config = job(schedule, micro_batches_of(schedule), zero_optimization={"stage": zero})
    return losses_of(build(twice(frozen), config))


@pytest.mark.parametrize("frozen", ["weight", "scale"])
@pytest.mark.parametrize(("schedule", "zero"), [("zb_h1", 1), ("zb_v", 0), ("bitpipe_zb", 1)])
def test_split_backwards_of_an_own_function(ranks2: RankPool, schedule: str, zero: int, frozen: str) -> None:
    expected = in_one_process(twice(frozen), plain_numbers, 4)
    assert ranks2.run(train_twice, schedule, frozen, zero)[0] == pytest.approx(expected, rel=1e-5)


# --- hooks on the tensors between stages (pytorch#185331, #185355) ---


class Hooked(nn.Linear):
    """Layer with a hook before it that registers a hook on its input."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_forward_pre_hook(self.watch)

    def watch(self, module: nn.Module, inputs: Any) -> None:
        [x] = inputs
        if torch.is_tensor(x) and x.requires_grad:
            x.register_hook(self.count)

    def count(self, grad: Tensor) -> None:
        self.calls += 1


def calls_of_hooks(rank: int, transport: str) -> dict[str, list[int]]:
    """Return the calls of all hooks of this rank in each of 5 steps, by schedule."""
    found = {}
    for schedule in SCHEDULES:
        config = job(schedule, micro_batches_of(schedule), ds_ext={"transport": transport})
        engine, batches, calls = (
            build([LayerSpec(Hooked) for _ in range(8)], config),
            Batches(plain_numbers),
            [],
        )
        hooked = [module for module in engine.module.modules() if isinstance(module, Hooked)]
        for _ in range(5):
            engine.train_batch(batches)
            calls.append(sum(module.calls for module in hooked) - sum(calls))
        engine.transport.close()
        found[schedule] = calls
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_hooks_on_boundary_tensors_do_not_pile_up(ranks2: RankPool, transport: str) -> None:
    """Four micro-batches of eight layers, the first of which has inputs without a gradient."""
    of_ranks = ranks2.run(calls_of_hooks, transport, timeout_s=180)
    for schedule in SCHEDULES:
        of_steps = [sum(calls) for calls in zip(*(found[schedule] for found in of_ranks), strict=True)]
        assert of_steps == [4 * 7] * 5, schedule


# --- outputs of an evaluation by the size of micro-batches (verl#6280) ---

SAMPLES = 64


def log_probabilities(rank: int, precision: str) -> list[Tensor]:
    """Return log-probabilities of the labels of all samples from micro-batches of 2 and of 4."""
    tokens_BS, labels_BS = random_batches(MODEL, 1, 1, SAMPLES)[0][0]
    found = []
    for size in (2, 4):
        deepspeed: dict[str, Any] = {"train_batch_size": SAMPLES, "train_micro_batch_size_per_gpu": size}
        deepspeed |= {"bf16": {"enabled": True}} if precision == "bf16" else {}
        engine, _ = build_gpt(Job("1f1b", 2, 1, 1, SAMPLES // size, MODEL, deepspeed=deepspeed))
        pairs = list(zip(tokens_BS.split(size), labels_BS.split(size), strict=True))
        _, logits = engine.eval_batch(StepBatches([pairs]), return_logits=True)
        engine.transport.close()
        if logits:
            logits_BSV = torch.cat([logits[number] for number in sorted(logits)])[..., : MODEL.vocab_size]
            all_BSV = logits_BSV.float().log_softmax(-1)
            found.append(all_BSV.gather(-1, labels_BS[..., None]))
    return found


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=needs("bf16"))])
def test_log_probabilities_hardly_depend_on_the_micro_batch_size(ranks: Ranks, precision: str) -> None:
    small, large = ranks(2).run(log_probabilities, precision, timeout_s=120)[1]
    torch.testing.assert_close(small, large, rtol=0, atol=1e-5 if precision == "fp32" else 0.02)


# --- adapters beside a head in parts (Megatron-Bridge#2240) ---


def save_adapter(rank: int, folder: str, target: str) -> float:
    """Train adapters for two steps and save them. Return the loss of the third step."""
    import peft

    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    layers, loss_fn = ds_ext.from_transformers(folder, lora=lora)
    config = config_of("zb_v", 2, 4, optimizer={"type": "SGD", "params": {"lr": 0.5}})
    config["ds_ext"]["vocabulary_parallel_head"] = True
    model = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches = Batches(micro_batch)  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        engine.train_batch(batches)
    ds_ext.save_adapter(engine, lora, target)
    loss = float(engine.train_batch(batches))
    engine.transport.close()
    return loss


def test_an_adapter_beside_a_head_in_parts_is_whole(ranks2: RankPool, tmp_path: Path) -> None:
    peft, transformers = map(pytest.importorskip, ("peft", "transformers"))
    folder, target = save_decoder("Llama", tmp_path / "model", num_hidden_layers=6), tmp_path / "adapter"
    expected = ranks2.run(save_adapter, folder, str(target), timeout_s=120)[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(base, target)
    assert mean_loss(model, 2, 4, backward=False) == pytest.approx(expected, rel=1e-5)
