"""Checkpoints of a user's own layers: buffers, frozen parameters, groups, extra states, the position in the data."""

from __future__ import annotations

import io
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import ds_ext
from ds_ext.engine.checkpoint.file import read_plain
from ds_ext.engine.checkpoint.lock import LOCK
from ds_ext.errors import CheckpointError, ConfigError
from tests.engine_runs import StepBatches
from tests.plans import batch_of
from tests.ranks import Ranks


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
        **batch_of(schedule, gas, pp),
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
    with pytest.raises(ConfigError, match=r"^engine: "):
        engine.save_checkpoint(folder, client_state={"fine": [1], "engine": Counting})
    engine.transport.close()
    return losses, [int(layer.count) for layer in engine.module.modules() if isinstance(layer, Counting)]


@pytest.mark.parametrize("zero", [0, 1])
def test_layers_of_a_user(ranks: Ranks, tmp_path: Path, zero: int) -> None:
    straight, _ = ranks(4).run(own_part, ("1f1b", 4, 4, zero), str(tmp_path / "a"), False, 6)[0]
    halves, _ = ranks(4).run(own_part, ("1f1b", 4, 4, zero), str(tmp_path / "b"), False, 3)[0]
    results = ranks(2).run(own_part, ("bitpipe", 2, 2, zero), str(tmp_path / "b"), True, 3)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        LOCK,
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
        **batch_of(schedule, gas),
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
    assert "2.weight/momentum_buffer: " in first["said"][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "global_step4", "latest"]


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
    assert "'global_step2' was not saved: rank 1: File too large" in said[0] and "random_rank_01" in said[0]
    assert "is global_step1." in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "global_step1", "latest"]
