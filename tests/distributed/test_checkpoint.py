"""A checkpoint that was written under any schedule and sizes goes on under any other, from where it was."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import resource
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn

import ds_ext
from ds_ext.engine.checkpoint_file import TensorFile, layer_file, read_plain
from ds_ext.errors import CheckpointError, ConfigError
from ds_ext.models.gpt import gpt_layer_specs
from ds_ext.tensor_parallel import DropoutClock, TensorParallel
from tests.engine_runs import MODEL, Job, StepBatches, build
from tests.ranks import Ranks
from tests.reference import random_batches

# The padded vocabulary is 88 without tensor parallelism and 96 with two ranks.
GPT = dataclasses.replace(MODEL, vocab_size=84)
STEPS, AT = 20, 10
EXACT = 1e-5  # sums in another order
HALF = 1e-3  # computed in 8 or 11 bits in another order; see test_precision.py

Sizes = tuple[str, int, int, int, int]  # schedule, PP, TP, DP, micro-batches of a pipeline group


def settings(precision: str, zero: int) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "bf16, sums in fp32": {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        },
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 7}},
    }
    return sections[precision] | {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 15, "warmup_type": "linear"}},
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 10**6},
    }


def train_and_save(rank: int, job: Job, folder: str) -> list[float]:
    """The losses of all steps; a checkpoint on the way."""
    engine, _ = build(job)
    batches = StepBatches(random_batches(job.model, STEPS, job.micro_batches * job.dp))
    losses = []
    for step in range(STEPS):
        if step == AT:
            engine.save_checkpoint(folder, tag="saved", client_state={"step": AT, "note": ["kept", 1.5]})
        losses.append(float(engine.train_batch(batches)))
    engine.transport.close()
    return losses


def go_on(
    rank: int, job: Job, folder: str, tag: str | None, again: str
) -> tuple[list[float], dict[str, Any]]:
    """The losses of the steps after the checkpoint, and what was loaded; it is saved again before they begin."""
    engine, _ = build(job)
    path, state = engine.load_checkpoint(folder, tag)
    assert path is not None and state is not None
    loaded = {
        **state,
        "tag": Path(path).name,
        "steps": engine.global_steps,
        "samples": engine.global_samples,
        "lr": engine.get_lr(),
        "scale": getattr(engine.optimizer, "loss_scale", None),
    }
    engine.save_checkpoint(folder, tag=again, client_state=state, save_latest=False)
    batches = StepBatches(random_batches(job.model, STEPS, job.micro_batches * job.dp))
    batches.step = AT
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS - AT)]
    engine.transport.close()
    return losses, loaded


def contents(checkpoint: Path) -> dict[str, Any]:
    """Every whole weight and optimizer state by name, put together without the code under test."""
    manifest = json.loads((checkpoint / "ds_ext.json").read_text())
    shards = manifest["job"]["tensor_parallel_size"]
    found: dict[str, Any] = {}
    for name, record in manifest["parameters"].items():
        numbers = range(shards if record["dim"] is not None else 1)

        def whole(parts: list[Tensor], record: dict[str, Any] = record) -> Tensor:
            dim = record["dim"] or 0
            length, joined = record["shape"][dim], torch.cat(parts, dim)
            assert not joined.narrow(dim, length, joined.size(dim) - length).any()  # padding is zero
            return joined.narrow(dim, 0, length)

        layers = [read_plain(checkpoint / layer_file(record["layer"], n, shards)) for n in numbers]
        found[name] = whole([layer[record["key"]] for layer in layers])
        found[f"{name} values"] = record["values"], record["group"]
        for state in record["states"]:
            parts = []
            for number in numbers:
                shard = torch.zeros(math.prod(record["shard"]))
                times = torch.zeros_like(shard)
                for file, start, count in record["fragments"][str(number)]:
                    shard[start : start + count] = TensorFile(checkpoint / file).read(
                        f"{name}/{state}", 0, count
                    )
                    times[start : start + count] += 1
                assert times.eq(1).all(), f"{name}/{state}: not every element is written once"
                parts.append(shard.view(record["shard"]))
            found[f"{name} {state}"] = whole(parts)
    return found


def same_contents(one: Path, other: Path) -> None:
    ours, theirs = contents(one), contents(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, Tensor) else value == theirs[name]
        assert same, name


BITPIPE_4, F1B_2, F1B_2_TP_2 = ("bitpipe", 4, 1, 1, 4), ("1f1b", 2, 1, 1, 4), ("1f1b", 2, 2, 1, 4)
F1B_2_DP_2, ZERO_BUBBLE_4 = ("1f1b", 2, 1, 2, 2), ("bitpipe_zb", 4, 1, 1, 4)
# before, after, precision, ZeRO stage, relative difference of losses
CASES: list[tuple[Sizes, Sizes, str, int, float]] = [
    (BITPIPE_4, F1B_2, "fp32", 0, EXACT),
    (F1B_2_TP_2, ZERO_BUBBLE_4, "fp32", 1, EXACT),
    (F1B_2_DP_2, F1B_2, "fp32", 1, EXACT),
    (("zb_v", 2, 1, 1, 4), ("bitpipe", 2, 2, 1, 4), "fp32", 1, EXACT),
    (BITPIPE_4, F1B_2, "bf16, sums in fp32", 1, EXACT),
    (F1B_2_DP_2, F1B_2, "bf16, sums in fp32", 1, EXACT),
    (F1B_2_TP_2, ZERO_BUBBLE_4, "bf16", 1, HALF),
    (BITPIPE_4, F1B_2, "bf16", 0, HALF),
    (("interleaved", 2, 1, 1, 4), ("bitpipe", 2, 1, 1, 4), "fp16", 1, HALF),
]


@pytest.mark.parametrize(
    ("before", "after", "precision", "zero", "tolerance"),
    CASES,
    ids=[f"{case[0][0]}-{case[1][0]}-{case[2]}-ZeRO{case[3]}" for case in CASES],
)
def test_going_on_under_other_sizes(
    ranks: Ranks, tmp_path: Path, before: Sizes, after: Sizes, precision: str, zero: int, tolerance: float
) -> None:
    """10 steps, a checkpoint and 10 steps under other sizes are 20 steps in one go."""
    first, second = (
        Job(*sizes, GPT, STEPS, deepspeed=settings(precision, zero)) for sizes in (before, after)
    )
    here, there = ranks(first.world_size), ranks(second.world_size)
    straight = here.run(train_and_save, first, str(tmp_path), timeout_s=120)[0]
    assert len(set(straight)) == STEPS
    results = there.run(go_on, second, str(tmp_path), None, "again", timeout_s=120)
    for losses, loaded in results:
        assert losses == pytest.approx(straight[AT:], rel=tolerance)
        assert loaded | {"step": AT, "note": ["kept", 1.5], "tag": "saved", "steps": AT} == loaded
        assert loaded["samples"] == AT * 8
        assert loaded["lr"] == pytest.approx([1e-2 * (AT - 1) / 15])
        if precision == "fp16":
            assert loaded["scale"] == 2.0**13  # ten steps without an overflow: doubled once
    # Weights, master weights and states are the same numbers, and each of them was written once.
    same_contents(tmp_path / "saved", tmp_path / "again")
    if tolerance > EXACT:
        # Half precision computes other losses under other sizes; back under the first they are the same.
        back = here.run(go_on, first, str(tmp_path), "again", "back", timeout_s=120)
        assert back[0][0] == pytest.approx(straight[AT:], rel=EXACT)


def test_precision_and_zero_stage_may_change(ranks: Ranks, tmp_path: Path) -> None:
    half = Job(*F1B_2, GPT, STEPS, deepspeed=settings("bf16", 1))
    full = Job(*F1B_2, GPT, STEPS, deepspeed=settings("fp32", 0))
    straight = ranks(2).run(train_and_save, half, str(tmp_path), timeout_s=120)[0]
    in_full, _ = ranks(2).run(go_on, full, str(tmp_path), None, "full", timeout_s=120)[0]
    assert in_full == pytest.approx(straight[AT:], rel=HALF) and in_full != straight[AT:]
    saved, full_weights = contents(tmp_path / "saved"), contents(tmp_path / "full")
    masters = [name for name in saved if name.endswith(" fp32")]
    assert masters
    for name in masters:
        assert torch.equal(saved[name], full_weights[name.removesuffix(" fp32")])
    back, _ = ranks(2).run(go_on, half, str(tmp_path), "full", "back", timeout_s=120)[0]
    assert back == straight[AT:]
    same_contents(tmp_path / "saved", tmp_path / "back")


def load_all(rank: int, folder: str, jobs: list[tuple[Job, str | None]]) -> list[str]:
    """What loading the checkpoint says to each job; all ranks must say it."""
    said = []
    for job, tag in jobs:
        engine, _ = build(job)
        before = [p.detach().clone() for p in engine.module.parameters()]
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            engine.load_checkpoint(folder, tag)
        said.append(str(caught.value))
        assert all(map(torch.equal, before, engine.module.parameters()))  # nothing was changed
        engine.transport.close()
    return said


def test_what_does_not_fit_is_refused_by_its_name(ranks: Ranks, tmp_path: Path) -> None:
    base = settings("fp32", 0)
    job = Job("1f1b", 2, 1, 1, 4, GPT, deepspeed=base)
    ranks(2).run(train_and_save, job, str(tmp_path), timeout_s=120)

    def model(**sizes: int) -> Job:
        return dataclasses.replace(job, model=dataclasses.replace(GPT, **sizes))

    def changed(**sections: Any) -> Job:
        return dataclasses.replace(job, deepspeed=base | sections)

    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    cosine = {"type": "CosineAnnealingLR", "params": {"T_max": 9}}
    refused: list[tuple[Job, str | None]] = [
        (model(hidden_size=64), None),
        (model(vocab_size=85), None),
        (model(num_layers=4), None),
        (changed(optimizer=sgd, scheduler={}), None),
        (changed(scheduler=cosine), None),
        (job, "nothing"),
    ]
    of_rank_0, of_rank_1 = ranks(2).run(load_all, str(tmp_path), refused, timeout_s=120)
    assert of_rank_0 == of_rank_1
    hidden, vocabulary, layers, optimizer, scheduler, tag = of_rank_0
    saved = str(tmp_path / "saved")
    assert (
        f"tied_modules.embed.word_embeddings.weight is 84 x 32 in {saved} and 84 x 64 in the model" in hidden
    )
    assert f"word_embeddings.weight is 84 x 32 in {saved} and 85 x 32 in the model" in vocabulary
    assert "12 layers" in layers and "has 8" in layers
    assert "the optimizer AdamW; this job has SGD" in optimizer
    assert "scheduler WarmupLR; this job has CosineAnnealingLR" in scheduler
    assert "no checkpoint 'nothing'" in tag and f"{tmp_path / 'latest'}: saved" in tag

    files = sorted(json.loads((tmp_path / "saved" / "ds_ext.json").read_text())["files"])
    for name in (files[-1], next(name for name in files if name.startswith("layer_"))):
        data = bytearray((tmp_path / "saved" / name).read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / "saved" / name).write_bytes(data)
        told = ranks(2).run(load_all, str(tmp_path), [(job, None)])
        assert told[0] == told[1] and f"{tmp_path / 'saved' / name} is damaged" in told[0][0]


# --- layers of a user: no tensor parallelism, buffers, frozen parameters, several parameter groups ---


class Counting(nn.Module):
    """A linear layer, and a buffer that counts its forwards in training."""

    count: Tensor

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(1))
        self.linear.requires_grad_(not frozen)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        return torch.tanh(self.linear(x) * self.scale)


def build_own(schedule: str, pp: int, gas: int, zero: int, frozen: bool = True) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 1000},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "ds_ext": {
            "schedule": schedule,
            "pipeline_parallel_size": pp,
            "transport_options": {"timeout_s": 30},
        },
    }
    layers = [LayerSpec(Counting, frozen and i == 3) for i in range(8)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() == 2]
    groups = [{"params": plain, "lr": 0.05}, {"params": decayed, "weight_decay": 0.1}]
    return ds_ext.initialize(model=model, model_parameters=groups, config=config)[0]


def own_batches(micro_batches: int) -> StepBatches:
    generator = torch.Generator().manual_seed(0)
    step = [tuple(torch.randn(2, 2, 4, generator=generator)) for _ in range(micro_batches)]
    return StepBatches([step] * 10)


def own_part(
    rank: int, sizes: tuple[str, int, int, int], folder: str, load: bool, steps: int
) -> tuple[list[float], list[int]]:
    """(Losses, forwards counted by each layer here); saved at the end."""
    engine = build_own(*sizes)
    if load:
        engine.load_checkpoint(folder)
        for group, lr in zip(engine.optimizer.param_groups, (0.05, 0.1), strict=True):
            assert group["lr"] == lr and group["momentum"] == 0.9
    batches = own_batches(4)
    losses = [float(engine.train_batch(batches)) for _ in range(steps)]
    engine.save_checkpoint(folder)
    with pytest.raises(ConfigError, match="'engine' is or holds something else"):
        engine.save_checkpoint(folder, client_state={"fine": [1], "engine": Counting})
    engine.transport.close()
    return losses, [int(layer.count) for layer in engine.module.modules() if isinstance(layer, Counting)]


@pytest.mark.parametrize("zero", [0, 1])
def test_layers_of_a_user(ranks: Ranks, tmp_path: Path, zero: int) -> None:
    straight, _ = ranks(4).run(own_part, ("1f1b", 4, 4, zero), str(tmp_path / "a"), False, 6)[0]
    halves, _ = ranks(4).run(own_part, ("1f1b", 4, 4, zero), str(tmp_path / "b"), False, 3)[0]
    results = ranks(2).run(own_part, ("bitpipe", 2, 2, zero), str(tmp_path / "b"), True, 3)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "global_step3",
        "global_step6",
        "latest",
    ]
    assert (tmp_path / "b" / "latest").read_text() == "global_step6"
    for losses, counts in results:
        assert halves + losses == pytest.approx(straight, rel=1e-6)
        # BitPipe's replicas go on from the same count, and each has half of the micro-batches.
        assert counts == [3 * 4 + 3 * 2] * 8
    frozen = read_plain(tmp_path / "b" / "global_step6" / "layer_03-model_states.pt")
    assert torch.equal(
        frozen["linear.weight"],
        read_plain(tmp_path / "a" / "global_step6" / "layer_03-model_states.pt")["linear.weight"],
    )


class Remembering(nn.Linear):
    """Counts its forwards in training outside of parameters and buffers."""

    def __init__(self, as_bytes: bool) -> None:
        super().__init__(4, 4)
        self.as_bytes, self.state = as_bytes, {"forwards": 0, "last": torch.zeros(4)}

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if self.training:
            self.state = {"forwards": self.state["forwards"] + 1, "last": output.detach()[0].clone()}
        return output

    def get_extra_state(self) -> Any:
        if not self.as_bytes:
            return self.state
        # As Transformer Engine's layers do; its size changes.
        file = io.BytesIO()
        torch.save(self.state | {"room": torch.zeros(self.state["forwards"])}, file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if self.as_bytes:
            state = torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True)
        self.state = {key: state[key] for key in ("forwards", "last")}


def remembering(schedule: str, gas: int) -> Any:
    """An engine with training data of its own."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "steps_per_print": 10**9,
        "ds_ext": {
            "schedule": schedule,
            "pipeline_parallel_size": 2,
            "transport_options": {"timeout_s": 30},
        },
    }
    layers = [LayerSpec(Remembering, i % 2 == 0) for i in range(4)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    samples = [(torch.sin(torch.arange(4.0) * i), torch.cos(torch.arange(4.0) * i)) for i in range(40)]
    return ds_ext.initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=samples
    )[0]


def go_on_in_the_data(rank: int, folder: str) -> dict[str, Any]:
    """The losses after a checkpoint at once and resumed, and what two failed saves say."""
    engine = remembering("1f1b", 4)
    for _ in range(4):  # 32 samples of 40: the next steps begin another epoch
        engine.train_batch()
    engine.save_checkpoint(folder, client_state={"own": 1})
    states = [layer.state for layer in engine.module.modules() if isinstance(layer, Remembering)]
    straight = [float(engine.train_batch()) for _ in range(2)]
    resumed, losses = {}, {}
    for schedule, gas in (("1f1b", 4), ("bitpipe", 2)):
        other = remembering(schedule, gas)
        other.train_batch()
        _, client_state = other.load_checkpoint(folder)
        assert client_state == {"own": 1}
        resumed[schedule] = [
            layer.state for layer in other.module.modules() if isinstance(layer, Remembering)
        ]
        losses[schedule] = [float(other.train_batch()) for _ in range(2)]
        other.transport.close()
    said = []
    if rank == 1:
        engine.module.stage_funcs[1][1].state = {"forwards": torch.nn.Linear}
    with pytest.raises(CheckpointError) as refused:
        engine.save_checkpoint(folder, "unreadable")
    said.append(str(refused.value))
    if rank == 1:
        engine.module.stage_funcs[1][1].state = states[1]
        weight = engine.module.stage_funcs[1][0].weight
        momentum = engine.optimizer.state[weight]["momentum_buffer"]
        engine.optimizer.state[weight]["momentum_buffer"] = momentum.to(torch.complex128)
    with pytest.raises(CheckpointError) as refused:
        engine.save_checkpoint(folder, "complex")
    said.append(str(refused.value))
    if rank == 0:
        engine.lr_scheduler = WithoutState()  # rank 0 writes its state
    with pytest.raises(AttributeError if rank == 0 else CheckpointError, match="state_dict"):
        engine.save_checkpoint(folder, "own error")
    engine.transport.close()
    return {"straight": straight, "losses": losses, "states": states, "resumed": resumed, "said": said}


class WithoutState:
    """A learning-rate scheduler that cannot be saved."""


def test_position_and_extra_states_are_loaded_and_what_cannot_be_saved_ends_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(2).run(go_on_in_the_data, str(tmp_path), timeout_s=120)
    assert first["straight"] == second["straight"] and len(set(first["straight"])) == 2
    for found in (first, second):
        assert found["losses"]["1f1b"] == found["straight"]
        assert found["losses"]["bitpipe"] == pytest.approx(found["straight"], rel=1e-6)
        torch.testing.assert_close(found["resumed"]["1f1b"], found["states"], rtol=0, atol=0)
        assert [state["forwards"] for state in found["states"]] == [16, 16]
    # A mirrored rank of BitPipe holds all four layers.
    everything = first["states"] + second["states"]
    torch.testing.assert_close(first["resumed"]["bitpipe"], everything, rtol=0, atol=0)
    assert first["said"] == second["said"]
    assert "Remembering.get_extra_state() of layer 3 (_extra_state)" in first["said"][0]
    assert "2.weight/momentum_buffer is of type torch.complex128" in first["said"][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step4", "latest"]


def save_without_room(rank: int, folder: str) -> str:
    """What a save says when rank 1 may not write more than 2000 bytes into a file."""
    engine = build_own("1f1b", 2, 4, 0)
    engine.train_batch(own_batches(4))
    engine.save_checkpoint(folder)
    engine.train_batch(own_batches(4))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert engine.load_checkpoint(folder)[0] == f"{folder}/global_step1"
    engine.transport.close()
    return str(caught.value)


def test_a_rank_that_cannot_write_leaves_the_last_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(2).run(save_without_room, str(tmp_path))
    assert said[0] == said[1]
    assert "'global_step2' was not saved: rank 1: File too large" in said[0] and "layer_0" in said[0]
    assert "The last whole one is global_step1" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]


def load_with_deepspeed(rank: int, folder: str) -> dict[str, Tensor]:
    """DeepSpeed's own engine reads the weights of our checkpoint."""
    module = deepspeed.pipe.PipelineModule(
        gpt_layer_specs(GPT, TensorParallel(), DropoutClock()),
        topology=PipeDataParallelTopology(2, 1),
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    path, _ = engine.load_checkpoint(folder, load_module_only=True)
    assert path is not None
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def test_deepspeed_reads_the_weights(ranks: Ranks, tmp_path: Path) -> None:
    job = Job("bitpipe", 4, 1, 1, 4, GPT, deepspeed=settings("fp32", 1))
    ranks(4).run(train_and_save, job, str(tmp_path), timeout_s=120)
    found = contents(tmp_path / "saved")
    for weights in ranks(2).run(load_with_deepspeed, str(tmp_path)):
        for name, weight in weights.items():
            assert torch.equal(weight[: found[name].size(0)], found[name]), name
