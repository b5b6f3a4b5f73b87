"""The head of a decoder of transformers in parts trains to the losses and weights of the model's own forward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import ds_ext
from ds_ext.engine.parameters import parameters_of
from ds_ext.recipes.convert.export import export
from tests.decoder_models import config_of, micro_batch, random_decoder, save_decoder
from tests.distributed.test_checkpoint import contents
from tests.distributed.test_head_parts import settings
from tests.distributed.test_own_layers import Batches
from tests.losses import learned
from tests.precisions import needs
from tests.ranks import Ranks
from tests.selection import extensive, select

load_file: Any = pytest.importorskip("safetensors.torch").load_file
peft: Any = pytest.importorskip("peft")

STEPS, MICRO_BATCHES, LR = 3, 8, 0.1
LAYERS = {"num_hidden_layers": 6}  # at least 8 layers before the head


@dataclass(frozen=True)
class Job:
    """Training of a decoder.

    Attributes:
        in_memory: the model is built on every rank, not read from the folder.
        slices: parts of the sequence of every micro-batch.
    """

    name: str
    schedule: str
    pp: int
    parts: bool = True
    chunked: bool = False
    in_memory: bool = False
    lora: bool = False
    slices: int = 1
    dtype: torch.dtype | None = torch.float64
    sections: dict[str, Any] = field(
        default_factory=lambda: {"optimizer": {"type": "SGD", "params": {"lr": LR}}}
    )


class Run:
    """Engine of this rank."""

    def __init__(self, job: Job, folder: str) -> None:
        model: Any = random_decoder(job.name, **LAYERS).to(job.dtype) if job.in_memory else folder
        lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False) if job.lora else None
        dtype = None if job.in_memory else job.dtype
        layers, loss_fn = ds_ext.from_transformers(model, lora=lora, dtype=dtype, chunked_loss=job.chunked)
        self.cut = layers[1].module_args[1]
        config = config_of(job.schedule, job.pp, MICRO_BATCHES, **job.sections)
        config["ds_ext"] |= {"vocabulary_parallel_head": job.parts, "sequence_slices": job.slices}
        self.module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
        parameters = self.module.parameters()
        self.engine, *_ = ds_ext.initialize(model=self.module, model_parameters=parameters, config=config)
        self.batches = Batches(micro_batch)  # pyright: ignore[reportArgumentType]

    def losses(self, steps: int) -> list[float]:
        return [float(self.engine.train_batch(self.batches)) for _ in range(steps)]

    def weights(self) -> dict[tuple[str, int], Tensor]:
        """Return the parameters of this rank by (name in the model, part of the head)."""
        return {
            (self.cut.name_of(local.layer, local.key), local.part): local.parameter.detach().clone()
            for local in parameters_of(self.module, 1).values()
        }


def train(rank: int, job: Job, folder: str) -> tuple[list[float], dict[tuple[str, int], Tensor]]:
    """Return the losses of an evaluation and of all steps, and the weights of this rank."""
    run = Run(job, folder)
    evaluated = float(run.engine.eval_batch(Batches(micro_batch)))  # pyright: ignore[reportArgumentType]
    losses = [evaluated, *run.losses(STEPS)]
    run.engine.transport.close()
    return losses, run.weights()


@cache
def in_one_process(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of all steps and the weights of a plain loop with the cross entropy in fp64."""
    model = random_decoder(name, **LAYERS).double().train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for step in range(STEPS):
        batches = [micro_batch(step, number) for number in range(MICRO_BATCHES)]
        count = sum(int((labels_BS[:, 1:] != -100).sum()) for _, labels_BS in batches)
        optimizer.zero_grad()
        losses.append(0.0)
        for (ids_BS, mask_BS), labels_BS in batches:
            logits_BSV = model(input_ids=ids_BS, attention_mask=mask_BS).logits
            targets_N = labels_BS[:, 1:].flatten()
            loss = cross_entropy(logits_BSV[:, :-1].flatten(0, 1), targets_N, reduction="sum") / count
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return learned(losses), {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "job",
    [
        Job("Llama", "1f1b", 4),
        Job("Llama", "bitpipe_zb", 4, chunked=True, slices=2),
        Job("GPTNeoX", "zb_v", 2, slices=5),
        Job("GPTNeoX", "bitpipe_zb", 2, in_memory=True),
    ],
    ids=lambda job: f"{job.name}-{job.schedule}-{job.pp}",
)
def test_trains_as_one_process(ranks: Ranks, tmp_path: Path, job: Job) -> None:
    folder = save_decoder(job.name, tmp_path, **LAYERS)
    results = ranks(job.pp).run(train, job, folder, timeout_s=120)
    losses, expected = in_one_process(job.name)
    found: dict[str, dict[int, Tensor]] = {}
    for found_losses, weights in results:
        assert found_losses == pytest.approx([losses[0], *losses], rel=1e-7)  # fp32
        for (name, part), weight in weights.items():
            assert torch.equal(found.setdefault(name, {}).setdefault(part, weight), weight)
    assert found.keys() == expected.keys()
    assert [len(parts) for parts in found.values() if len(parts) > 1] == [job.pp]
    for name, parts in found.items():
        weight = torch.cat([part for _, part in sorted(parts.items())])
        torch.testing.assert_close(
            weight[: len(expected[name])], expected[name], rtol=1e-10, atol=1e-10, msg=name
        )


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job("Llama", "1f1b", 2, sections=settings("bf16", 0)), marks=needs("bf16")),
        pytest.param(Job("Llama", "zb_v", 4, sections=settings("bf16", 1)), marks=[needs("bf16"), extensive]),
        Job("Llama", "bitpipe_zb", 4, dtype=torch.float32, sections=settings("fp32", 1)),
        Job("Llama", "zb_v", 2, lora=True, dtype=torch.float32),  # a frozen head
    ],
    ids=lambda job: f"{job.schedule}-{job.pp}",
)
def test_trains_as_without_parts(ranks: Ranks, tmp_path: Path, job: Job) -> None:
    folder = save_decoder(job.name, tmp_path, **LAYERS)
    bf16 = "bf16" in job.sections
    job = replace(job, dtype=torch.bfloat16 if bf16 else job.dtype)
    parts, whole = (
        ranks(job.pp).run(train, one, folder, timeout_s=120) for one in (job, replace(job, parts=False))
    )
    for (ours, _), (theirs, _) in zip(parts, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3 if bf16 else 1e-5)


# --- checkpoints ---


def train_and_save(rank: int, job: Job, folder: str, target: str) -> list[float]:
    """Return the losses of two steps after a checkpoint."""
    run = Run(job, folder)
    run.losses(1)
    run.engine.save_checkpoint(target, tag="saved")
    losses = run.losses(2)
    run.engine.transport.close()
    return losses


def load_and_train(rank: int, job: Job, folder: str, target: str) -> list[float]:
    """Return the losses of two steps after the checkpoint, which is saved again before them."""
    run = Run(job, folder)
    run.engine.load_checkpoint(target, "saved")
    run.engine.save_checkpoint(target, tag="again")
    run.batches.step = 1
    losses = run.losses(2)
    run.engine.transport.close()
    return losses


LAYOUTS = {
    "to-plain": (Job("Llama", "bitpipe_zb", 4), Job("Llama", "1f1b", 2, parts=False)),
    "from-plain": (Job("Llama", "1f1b", 2, parts=False), Job("Llama", "zb_v", 4)),
    "to-parts": (Job("Llama", "zb_v", 2), Job("Llama", "bitpipe_zb", 4)),
}


@pytest.mark.parametrize(
    ("saved", "loaded", "precision"),
    [
        pytest.param(*jobs, precision, marks=needs(precision), id=f"{name}-{precision}")
        for (name, jobs), precision in select(
            [*product(LAYOUTS.items(), ("fp32", "bf16"))],
            [*zip(LAYOUTS.items(), ("fp32", "fp32", "bf16"), strict=True)],
        )
    ],
)
def test_a_checkpoint_fits_any_layout(
    ranks: Ranks, tmp_path: Path, saved: Job, loaded: Job, precision: str
) -> None:
    folder, target = save_decoder("Llama", tmp_path / "model", **LAYERS), tmp_path / "saved"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    first, second = (replace(job, dtype=dtype, sections=settings(precision, 1)) for job in (saved, loaded))
    losses = ranks(first.pp).run(train_and_save, first, folder, str(target), timeout_s=120)[0]
    after = ranks(second.pp).run(load_and_train, second, folder, str(target), timeout_s=120)[0]
    assert after == pytest.approx(losses, rel=1e-5 if precision == "fp32" else 1e-3)
    exports = []
    for tag in ("saved", "again"):
        weights = tmp_path / f"weights_{tag}"
        export(target / tag, weights)
        exports.append((contents(target / tag), load_file(weights / "model.safetensors")))
    for one, other in zip(*exports, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name], (
                name
            )
