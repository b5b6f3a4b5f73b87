"""Averages of weights by torch's AveragedModel and copies of the module, as in one process that does the same."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ds_ext
from ds_ext.errors import ConfigError
from tests.precisions import needs
from tests.ranks import Ranks

SIZE, STEPS, BATCH, DECAY, LR = 4, 3, 8, 0.9, 0.02
BF16 = {"bf16": {"enabled": True}}
ZERO_1 = {"zero_optimization": {"stage": 1}}
JOBS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "V": ("zb_v", ZERO_1, {}),
    "two pipes": ("bitpipe", {}, {}),
    "two places of a tie": ("1f1b", ZERO_1, {}),
    "late gathers": ("bitpipe_zb", BF16, {"overlap_across_steps": True}),
}


class Layer(nn.Module):
    """Layer with a buffer that counts its calls in training."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + torch.tanh(self.linear(x))


def transposed(layer: Any, x: Tensor) -> Tensor:
    return x @ layer.weight


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.float() - labels).square().mean()


def samples(count: int = BATCH * STEPS * 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    # Values that bf16 represents.
    pairs = (torch.randn(2, SIZE, generator=generator).bfloat16().float() for _ in range(count))
    return [(pair[0], pair[1]) for pair in pairs]


def in_half(sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return sample[0].bfloat16(), sample[1]


def initial_weights() -> dict[str, Tensor]:
    """Initial weights of one process, by their names in the module."""
    torch.manual_seed(3)
    layers = {str(index): Layer() for index in range(1, 4)}
    weights = {
        f"{index}.{name}": p for index, layer in layers.items() for name, p in layer.named_parameters()
    }
    return {"tied_modules.tie.weight": torch.eye(SIZE) + 0.1 * torch.randn(SIZE, SIZE)} | {
        name: p.detach().bfloat16().float() for name, p in weights.items()
    }


def build(schedule: str, sections: dict[str, Any], ds_section: dict[str, Any]) -> Any:
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0, "torch_adam": True}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **sections,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": 2, "print_plan": False, **ds_section},
    }
    tie: dict[str, Any] = {"bias": False}
    layers = [
        TiedLayerSpec("tie", nn.Linear, SIZE, SIZE, **tie),
        *(LayerSpec(Layer) for _ in range(3)),
        TiedLayerSpec("tie", nn.Linear, SIZE, SIZE, forward_fn=transposed, **tie),
    ]
    model = ds_ext.PipelineModule(layers, config, loss_fn=loss_of, partition_method="uniform")
    weights = initial_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    data = [in_half(sample) for sample in samples()] if sections is BF16 else samples()
    engine, *_ = ds_ext.initialize(model=model, config=config, training_data=data)
    return engine


def swap(one: Any, other: Any) -> None:
    """Swap the values of the parameters of two modules, as scripts do for an evaluation."""
    with torch.no_grad():
        for first, second in zip(one.parameters(), other.parameters(), strict=True):
            values = first.clone()
            first.copy_(second)
            second.copy_(values)


def averaged(rank: int, job: str, folder: str) -> tuple[Any, ...]:
    """Average, evaluate with the averages, save them, and train on. Compare with a run that only trains."""
    engine, plain = build(*JOBS[job]), build(*JOBS[job])
    data = [in_half(sample) for sample in samples(BATCH)] if JOBS[job][1] is BF16 else samples(BATCH)
    average = AveragedModel(engine.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    losses, expected, evaluated = [], [], 0.0
    for step in range(2 * STEPS):
        losses.append(float(engine.train_batch()))
        expected.append(float(plain.train_batch()))
        engine.wait_for_weights()
        average.update_parameters(engine.module)
        if step == STEPS - 1:
            swap(engine.module, average.module)
            evaluated = float(engine.eval_batch(data))
            engine.save_checkpoint(folder, tag=job)
            swap(engine.module, average.module)
    # The state of the averages has the names of the module, and loads into it.
    state = {
        n.removeprefix("module."): v.clone() for n, v in average.state_dict().items() if n != "n_averaged"
    }
    loaded = build(*JOBS[job])
    loaded.load_checkpoint(folder, tag=job)
    from_checkpoint = float(loaded.eval_batch(data))
    loaded.module.load_state_dict(state)
    named = {n: v.float() for n, v in state.items() if not n.endswith("calls")}
    return losses, expected, evaluated, from_checkpoint, named, float(loaded.eval_batch(data))


def in_one_process() -> tuple[list[float], float, dict[str, Tensor], float]:
    weights: dict[str, Tensor] = {name: nn.Parameter(value) for name, value in initial_weights().items()}
    names = list(weights)

    def forward(values: dict[str, Tensor], x: Tensor) -> Tensor:
        tie = values["tied_modules.tie.weight"]
        x = nn.functional.linear(x, tie)
        for index in range(1, 4):
            x = x + torch.tanh(
                nn.functional.linear(x, values[f"{index}.linear.weight"], values[f"{index}.linear.bias"])
            )
        return x @ tie

    def mean_loss(values: dict[str, Tensor], batch: list[tuple[Tensor, Tensor]]) -> Tensor:
        inputs, labels = map(torch.stack, zip(*batch, strict=True))
        return loss_of(forward(values, inputs), labels)

    model: Any = nn.ParameterDict({name.replace(".", "/"): p for name, p in weights.items()})
    average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.AdamW(weights.values(), lr=LR, weight_decay=0.0)
    losses, data, evaluated = [], samples(), 0.0

    def averages() -> dict[str, Tensor]:
        return {name: average.module[name.replace(".", "/")].detach().clone() for name in names}

    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss = mean_loss(weights, data[BATCH * step : BATCH * (step + 1)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        average.update_parameters(model)
        if step == STEPS - 1:
            evaluated = mean_loss(averages(), data[:BATCH]).item()
    return losses, evaluated, averages(), mean_loss(averages(), data[:BATCH]).item()


@pytest.mark.parametrize(
    "job", [pytest.param(n, marks=needs("bf16") if j[1] is BF16 else ()) for n, j in JOBS.items()]
)
def test_averages_are_those_of_one_process(ranks: Ranks, job: str, tmp_path: Any) -> None:
    expected, expected_eval, expected_averages, expected_last = in_one_process()
    names: set[str] = set()
    rel, atol = (3e-2, 2e-2) if JOBS[job][1] is BF16 else (1e-5, 1e-6)
    for losses, plain, evaluated, from_checkpoint, averages, last in ranks(2).run(
        averaged, job, str(tmp_path)
    ):
        assert losses == plain  # the averages change nothing
        assert losses == pytest.approx(expected, rel=rel)
        assert evaluated == from_checkpoint == pytest.approx(expected_eval, rel=rel)
        assert last == pytest.approx(expected_last, rel=rel)
        for name, value in averages.items():
            torch.testing.assert_close(value, expected_averages[name], rtol=rel, atol=atol, msg=name)
        names |= averages.keys()
    assert names == expected_averages.keys()
    assert len({round(value, 3) for value in (expected_eval, expected_last, expected[STEPS])}) == 3


def copy_module(rank: int, schedule: str, with_buffers: bool) -> list[bool]:
    engine = build(schedule, ZERO_1, {})
    module, copied = engine.module, copy.deepcopy(engine.module)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=with_buffers)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    engine.train_batch()
    average.update_parameters(module)  # the first update copies
    pairs = zip(average.module.buffers(), module.buffers(), strict=True)
    places, originals = (
        {index: layer for stage in one.stages for index, layer in one.stage_modules(stage).items()}
        for one in (copied, module)
    )
    used = {id(p) for layer in places.values() for p in layer.parameters()}
    result = [
        all(torch.equal(p, old) for p, old in zip(copied.parameters(), before, strict=True)),
        not any(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True)),
        all(torch.equal(one, other) and one is not other for one, other in pairs),
        list(copied.state_dict()) == list(module.state_dict()),
        used == {id(p) for p in copied.parameters()},
        all(places[index] is not originals[index] for index in places),
        copied.plan is module.plan and copied.mpu() is module.mpu(),
        copy.copy(module).mpu() is module.mpu(),
    ]
    for write in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        for value in (engine, module, average):
            with pytest.raises(ConfigError, match="state_dict"):
                write(value)
    with pytest.raises(ConfigError, match=r"engine\.module"):
        copy.deepcopy(engine)
    return result


@pytest.mark.parametrize("with_buffers", [True, False])
@pytest.mark.parametrize("schedule", ["zb_v", "bitpipe"])
def test_copies_share_ties_and_nothing_that_trains(ranks: Ranks, schedule: str, with_buffers: bool) -> None:
    for checks in ranks(2).run(copy_module, schedule, with_buffers):
        assert all(checks), checks
