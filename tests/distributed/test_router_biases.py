"""Biases of routers: one change per step, from the tokens of all micro-batches, as in one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ds_ext
from ds_ext.__main__ import main
from ds_ext.errors import ConfigError
from ds_ext.experts.loads import BIAS
from tests.decoder_models import (
    EXPERTS_MODELS,
    config_of,
    mean_loss,
    micro_batch,
    random_decoder,
    save_decoder,
)
from tests.distributed.test_own_layers import Batches
from tests.ranks import Ranks
from tests.selection import select

transformers: Any = pytest.importorskip("transformers")
RATE, LR, STEPS, MICRO_BATCHES = 0.3, 0.1, 3, 4


class Job(NamedTuple):
    schedule: str
    pp: int
    tp: int = 1
    dp: int = 1
    changes: Mapping[str, Any] | None = None  # of the JSON
    settings: Mapping[str, Any] | None = None  # of its section


JOBS = {
    "bidirectional": Job("bitpipe_zb", 2, 2),
    "replicas": Job(
        "1f1b", 1, dp=2, changes={"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    ),
    "recomputed": Job("zb_v", 2, changes={"pipeline": {"activation_checkpoint_interval": 1}}),
    "slices": Job("1f1b", 2, settings={"sequence_slices": 2}),
    "audited": Job("bitpipe", 2, settings={"audit_interval": 1}),
}


@cache
def in_one_process(name: str, rate: float) -> tuple[list[float], dict[str, Tensor]]:
    """Train the model's own forward, and change the biases by hand. Returns losses and biases."""
    model = random_decoder(name, **EXPERTS_MODELS[name]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    counts: dict[str, Tensor] = {}

    def count(path: str, experts: nn.Module, args: Any) -> None:
        tokens_E = args[1].flatten().bincount(minlength=experts.num_experts)
        counts[path] = counts[path] + tokens_E if path in counts else tokens_E

    for path, module in model.named_modules():
        if path.endswith("experts") and "shared" not in path:
            module.register_forward_pre_hook(lambda m, args, path=path: count(path, m, args))
    losses = []
    for step in range(STEPS):
        counts.clear()
        losses.append(mean_loss(model, step, MICRO_BATCHES))
        optimizer.step()
        optimizer.zero_grad()
        for path, tokens_E in counts.items():
            gate = model.get_submodule(path.replace("experts", "gate"))
            excess_E = tokens_E * len(tokens_E) - tokens_E.sum()
            getattr(gate, BIAS).sub_(rate * excess_E.sign())
    return losses, {name: buffer for name, buffer in model.named_buffers() if name.endswith(BIAS)}


def train(rank: int, folder: str, job: Job, rate: float, save: str) -> list[float] | str:
    layers, loss_fn = ds_ext.from_transformers(folder)
    config = {**config_of(job.schedule, job.pp, MICRO_BATCHES // job.dp), **(job.changes or {})}
    config["ds_ext"] |= {
        "tensor_parallel_size": job.tp,
        "router_bias_update_rate": rate,
        **(job.settings or {}),
    }
    config["train_batch_size"] //= job.tp  # counted for groups of one rank
    module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    try:
        engine, *_ = ds_ext.initialize(model=module, optimizer=optimizer, config=config)
    except ConfigError as error:
        return str(error)
    batches, others = (Batches(micro_batch) for _ in range(2))  # pyright: ignore[reportArgumentType]
    losses = []
    for _ in range(STEPS):
        losses.append(float(engine.train_batch(batches)))
        engine.eval_batch(others)  # its tokens do not count
    if save:
        engine.save_checkpoint(save)
    engine.transport.close()
    return losses


@pytest.mark.parametrize(
    ("name", "job"),
    select(
        [(name, job) for name in ("DeepseekV3", "Glm4Moe") for job in JOBS],
        [("DeepseekV3", "bidirectional"), ("Glm4Moe", "recomputed"), ("Glm4Moe", "replicas")],
    ),
)
def test_biases_change_by_the_tokens_of_all_micro_batches(
    ranks: Ranks, tmp_path: Path, name: str, job: str
) -> None:
    """Evaluations, recomputations and audits count no token. The exported folder has the biases."""
    folder, saved, output = (str(tmp_path / part) for part in ("model", "saved", "trained"))
    save_decoder(name, Path(folder), **EXPERTS_MODELS[name])
    size = JOBS[job].pp * JOBS[job].tp * JOBS[job].dp
    expected, biases = in_one_process(name, RATE)
    for losses in ranks(size).run(train, folder, JOBS[job], RATE, saved, timeout_s=120):
        assert losses == pytest.approx(expected, rel=2e-5)
    assert expected != pytest.approx(in_one_process(name, 0.0)[0], rel=3e-4)  # routes changed
    assert main(["convert", saved, "--to", "hf", output, "--hf-model", folder]) == 0
    trained = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    exported = dict(trained.named_buffers())
    assert biases and all(torch.equal(exported[key], bias_E) for key, bias_E in biases.items())
    assert any(bias_E.any() for bias_E in biases.values())


@pytest.mark.parametrize(
    ("name", "job", "cause"),
    [("Mixtral", Job("1f1b", 2), "no router"), ("Glm4Moe", Job("fbd", 2), "forward ranks")],
)
def test_models_and_schedules_without_biases_are_refused(
    ranks: Ranks, tmp_path: Path, name: str, job: Job, cause: str
) -> None:
    folder = save_decoder(name, tmp_path / "model", **EXPERTS_MODELS.get(name, {}))
    for error in ranks(4 if job.schedule == "fbd" else 2).run(train, folder, job, RATE, "", timeout_s=60):
        assert error.startswith("router_bias_update_rate: ") and cause in error
