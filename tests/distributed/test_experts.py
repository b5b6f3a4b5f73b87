"""DeepSpeed's MoE layers: whole on every rank they train as in one process; divided over ranks they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

import ds_ext
from ds_ext.errors import ConfigError
from tests.engine_runs import StepBatches
from tests.ranks import RankPool, Ranks

WIDTH, STEPS, LR, CLIP = 8, 3, 0.5, 0.1
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


class Experts(nn.Module):
    """Residual experts in a module of a layer."""

    def __init__(self, ep_size: int = 1) -> None:
        super().__init__()
        options = {"min_capacity": 0, "drop_tokens": False, "use_rts": False}
        self.block = nn.ModuleDict({"moe": MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 2, ep_size, **options)})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block["moe"](x)[0]


class OwnExperts(nn.Module):
    """Expert with DeepSpeed's marks, in a layer that is no MoE."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for parameter in self.linear.parameters():
            vars(parameter).update(allreduce=False, group_name="own")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def layers(*experts: nn.Module) -> list[nn.Module]:
    """Layers with experts at the end, so that some stages have none; one seed for all ranks."""
    torch.manual_seed(3)
    ends = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    return [*ends[:6], *(experts or (Experts(), Experts())), *ends[6:]]


def config(schedule: str, pp: int, **sections: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **sections,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": pp, **sections.get("ds_ext", {})},
    }


def batches() -> list[list[Any]]:
    generator = torch.Generator().manual_seed(0)
    step = [tuple(torch.randn(2, 2, WIDTH, generator=generator)) for _ in range(8)]
    return [step] * STEPS


def reference(dtype: torch.dtype) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and weights of one process. Weights of ``dtype`` have fp32 master weights."""
    model = nn.Sequential(*layers())
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    losses, norms = [], []
    for step in batches():
        for parameter, master in zip(model.to(dtype).parameters(), masters, strict=True):
            parameter.data, parameter.grad = master.to(dtype), None
        sums = [torch.zeros_like(master) for master in masters]
        total = 0.0
        for inputs, labels in step:
            loss = nn.functional.mse_loss(model(inputs.to(dtype)), labels.to(dtype))
            grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            sums = [s if g is None else s + g.float() / len(step) for s, g in zip(sums, grads, strict=True)]
            total += loss.item() / len(step)
        norm = torch.stack([s.norm() for s in sums]).norm()
        scale = min(1.0, CLIP / (float(norm) + 1e-6))
        masters = [master - LR * scale * s for master, s in zip(masters, sums, strict=True)]
        losses.append(total)
        norms.append(float(norm))
    names = [name for name, _ in model.named_parameters()]
    return losses, norms, dict(zip(names, masters, strict=True))


def train(rank: int, settings: dict[str, Any], folder: Path) -> Any:
    """Losses, norms and weights of this rank, and its weights after a load of the saved ones."""
    half = torch.bfloat16 if "bf16" in settings else torch.float32
    model = ds_ext.PipelineModule(
        layers(),
        settings,
        loss_fn=lambda outputs, labels: nn.functional.mse_loss(outputs, labels.to(half)),
        partition_method="uniform",
    )
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), config=settings)
    data = StepBatches([[(x.to(half), y) for x, y in step] for step in batches()])
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(engine.train_batch(data)))
        norms.append(float(engine.get_global_grad_norm()))

    def weights() -> dict[str, Tensor]:
        return {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}

    engine.save_checkpoint(folder)
    trained = weights()
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    engine.load_checkpoint(folder)
    engine.transport.close()
    return losses, norms, trained, weights()


@pytest.mark.parametrize(
    ("schedule", "world", "pp", "sections"),
    [
        ("1f1b", 2, 1, {}),
        ("1f1b", 2, 2, {}),  # experts on one rank only
        ("bitpipe", 2, 2, {}),
        ("bitpipe", 4, 4, {}),  # replicas are not neighbors
        ("1f1b", 2, 1, {"zero_optimization": {"stage": 1}}),
        ("bitpipe", 2, 2, {"zero_optimization": {"stage": 1}}),
        ("bitpipe", 2, 2, BF16),
        ("1f1b", 2, 1, {**BF16, "zero_optimization": {"stage": 1}}),
    ],
)
def test_whole_experts_train_as_in_one_process(
    ranks: Ranks,
    tmp_path: Path,
    schedule: str,
    world: int,
    pp: int,
    sections: dict[str, Any],
) -> None:
    half = "bf16" in sections
    losses, norms, weights = reference(torch.bfloat16 if half else torch.float32)
    near = 1e-2 if half else 1e-5
    assert min(norms) > CLIP and losses[-1] < losses[0]
    seen = set[str]()
    for got in ranks(world).run(train, config(schedule, pp, **sections), tmp_path):
        assert got[0] == pytest.approx(losses, rel=near)
        assert got[1] == pytest.approx(norms, rel=near)
        for name, weight in got[2].items():
            torch.testing.assert_close(weight, weights[name], rtol=near, atol=near)
            assert torch.equal(weight, got[3][name])
        seen |= {*got[2]}
    assert seen == {*weights}


def refusals(rank: int, settings: dict[str, Any], tensor: bool) -> list[str]:
    """Errors of models with divided experts, or with tensor parallelism."""
    texts = []
    for experts in [Experts()] if tensor else [Experts(ep_size=2), OwnExperts()]:
        model = ds_ext.PipelineModule(
            layers(experts), settings, loss_fn=nn.functional.mse_loss, partition_method="uniform"
        )
        with pytest.raises(ConfigError) as caught:
            ds_ext.initialize(model=model, model_parameters=model.parameters(), config=settings)
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 1), ("1f1b", 2), ("bitpipe", 2)])
def test_divided_experts_are_refused_by_name(ranks2: RankPool, schedule: str, pp: int) -> None:
    first, second = ranks2.run(refusals, config(schedule, pp), False)
    assert first == second
    whole, own = first
    assert whole.startswith("layer 6 (Experts)") and "block.moe: ep_size_2" in whole and "ep_size=1" in whole
    assert own.startswith("layer 6 (OwnExperts)") and "linear.weight: own" in own


def test_experts_with_tensor_parallelism_are_refused(ranks2: RankPool) -> None:
    settings = config("1f1b", 1, ds_ext={"tensor_parallel_size": 2})
    first, second = ranks2.run(refusals, settings, True)
    assert first == second
    assert first[0].startswith("layer 6 (Experts)") and "tensor_parallel_size 2" in first[0]
