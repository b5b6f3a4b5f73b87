"""A head in parts on all devices trains to the losses and weights of one plain process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor

from ds_ext.engine import PipelineModule, initialize
from ds_ext.engine.module_plan import head_parts
from ds_ext.engine.rank_state import RankState
from ds_ext.engine.ties.separated import divide_tied_embedding
from ds_ext.errors import ConfigError
from ds_ext.recipes.models.gpt import GPTConfig, GPTEmbedding, gpt_layer_specs, gpt_loss
from ds_ext.tensor_parallel import DropoutClock, TensorParallel
from tests.distributed.test_checkpoint import contents
from tests.engine_runs import TIED, UNTIED, Job, StepBatches, batches_of, build, train
from tests.precisions import needs
from tests.ranks import Ranks
from tests.selection import extensive

HEAD = UNTIED.num_layers + 3  # index of the head's layer
STEPS = 3


def job_of(
    schedule: str, pp: int, tp: int = 1, dp: int = 1, model: GPTConfig = UNTIED, **options: Any
) -> Job:
    return Job(schedule, pp, tp, dp, 4, model, STEPS, head_parts=True, **options)


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}


def settings(precision: str, zero: int) -> dict[str, Any]:
    half: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        half["fp16"]["initial_scale_power"] = 8
    return {**ADAM, **half, "zero_optimization": {"stage": zero, "reduce_bucket_size": 10**6}}


@pytest.mark.parametrize(
    ("schedule", "pp", "tp", "dp", "precision", "zero", "overlap", "model"),
    [
        ("1f1b", 2, 1, 2, "fp32", 1, True, UNTIED),
        pytest.param("zb_v", 2, 2, 2, "fp32", 1, False, UNTIED, marks=extensive),
        pytest.param("bitpipe_zb", 4, 1, 1, "fp32", 1, True, UNTIED, marks=extensive),
        ("interleaved", 2, 1, 2, "fp32", 0, True, UNTIED),
        ("bitpipe_zb", 4, 1, 1, "fp32", 1, True, TIED),
        pytest.param("interleaved", 2, 1, 2, "fp32", 0, True, TIED, marks=extensive),
        pytest.param("1f1b", 4, 1, 1, "bf16", 0, False, UNTIED, marks=needs("bf16")),
        pytest.param("zb_v", 2, 1, 2, "bf16", 1, True, UNTIED, marks=needs("bf16")),
        pytest.param("bitpipe_zb", 2, 2, 1, "bf16", 1, False, UNTIED, marks=needs("bf16")),
        pytest.param("1f1b", 2, 1, 2, "bf16", 1, False, TIED, marks=[needs("bf16"), extensive]),
        pytest.param("zb_v", 4, 1, 1, "bf16", 1, True, TIED, marks=needs("bf16")),
        pytest.param("bitpipe_zb", 4, 1, 1, "bf16", 1, True, TIED, marks=[needs("bf16"), extensive]),
        pytest.param("1f1b", 2, 1, 2, "fp16", 0, False, UNTIED, marks=needs("fp16")),
        pytest.param("bitpipe_zb", 4, 1, 1, "fp16", 1, False, UNTIED, marks=needs("fp16")),
        pytest.param("bitpipe_zb", 4, 1, 1, "fp16", 1, False, TIED, marks=needs("fp16")),
    ],
)
def test_precisions_and_zero(
    ranks: Ranks,
    schedule: str,
    pp: int,
    tp: int,
    dp: int,
    precision: str,
    zero: int,
    overlap: bool,
    model: GPTConfig,
) -> None:
    job = job_of(schedule, pp, tp, dp, model, deepspeed=settings(precision, zero), overlap=overlap)
    parts, whole = (
        ranks(job.world_size).run(train, one, timeout_s=120) for one in (job, replace(job, head_parts=False))
    )
    tolerance = 1e-5 if precision == "fp32" else 1e-3
    for ours, theirs in zip(parts, whole, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=10 * tolerance)
        assert ours["skipped"] == theirs["skipped"] == 0
        assert ours["eager"] == theirs["eager"]


# --- checkpoints ---


def train_and_save(rank: int, job: Job, folder: str) -> list[float]:
    """Losses of all steps, with a checkpoint after the first one."""
    engine, _ = build(job)
    batches, losses = StepBatches(batches_of(job)), []
    for step in range(STEPS):
        if step == 1:
            engine.save_checkpoint(folder, tag="saved")
        losses.append(float(engine.train_batch(batches)))
    engine.transport.close()
    return losses


def load_and_train(rank: int, job: Job, folder: str) -> list[float]:
    """Losses of the steps after the checkpoint, which is saved again before them."""
    engine, _ = build(job)
    engine.load_checkpoint(folder, "saved")
    engine.save_checkpoint(folder, tag="again")
    batches = StepBatches(batches_of(job))
    batches.step = 1
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS - 1)]
    engine.transport.close()
    return losses


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=[needs("bf16"), extensive])])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (job_of("bitpipe_zb", 4), replace(job_of("1f1b", 2, 2), head_parts=False)),
        (replace(job_of("1f1b", 2, 2), head_parts=False), job_of("bitpipe_zb", 4)),
        (job_of("zb_v", 2, 2), job_of("bitpipe_zb", 2)),
        (job_of("1f1b", 2), replace(job_of("1f1b", 1, 2), head_parts=False)),
        (job_of("bitpipe_zb", 4, model=TIED), replace(job_of("1f1b", 2, 2, model=TIED), head_parts=False)),
        (replace(job_of("zb_v", 2, 2, model=TIED), head_parts=False), job_of("1f1b", 4, model=TIED)),
        (job_of("zb_v", 2, 2, model=TIED), job_of("bitpipe_zb", 2, model=TIED)),
    ],
    ids=[
        *("to-plain", "from-plain", "to-parts", "equal-shards"),
        *("tied-to-plain", "tied-from-plain", "tied-to-parts"),
    ],
)
def test_a_checkpoint_fits_any_layout(
    ranks: Ranks, tmp_path: Path, saved: Job, loaded: Job, precision: str
) -> None:
    first, second = (replace(job, deepspeed=settings(precision, 1)) for job in (saved, loaded))
    losses = ranks(first.world_size).run(train_and_save, first, str(tmp_path))[0]
    after = ranks(second.world_size).run(load_and_train, second, str(tmp_path))[0]
    assert after == pytest.approx(losses[1:], rel=1e-5 if precision == "fp32" else 1e-3)
    one, other = (contents(tmp_path / tag) for tag in ("saved", "again"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name], name


def names_of_state(rank: int, job: Job) -> tuple[int, int]:
    """Number of weights in a snapshot of this rank, and of its parameters."""
    engine, _ = build(job)
    names = [name for name in RankState(engine).tensors() if name.startswith("weight/")]
    engine.transport.close()
    return len(names), len(list(engine.module.parameters()))


@pytest.mark.parametrize("model", [UNTIED, TIED], ids=["untied", "tied"])
def test_a_snapshot_has_both_parts_of_a_device(ranks: Ranks, model: GPTConfig) -> None:
    for tensors, parameters in ranks(4).run(names_of_state, job_of("bitpipe_zb", 4, model=model)):
        assert tensors == parameters


# --- other features ---


def losses_and_audits(rank: int, job: Job) -> tuple[int, int]:
    engine, _ = build(job)
    batches = StepBatches(batches_of(job))
    for _ in range(STEPS):
        engine.train_batch(batches)
    engine.transport.close()
    assert engine.audit is not None
    return engine.audit.clean, engine.audit.done


@pytest.mark.parametrize("model", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe_zb"])
def test_audits_pass(ranks: Ranks, schedule: str, model: GPTConfig) -> None:
    dp = 1 if schedule == "bitpipe_zb" else 2
    job = job_of(schedule, 2, 1, dp, model, ds_ext={"audit_interval": 1})
    assert ranks(job.world_size).run(losses_and_audits, job) == [(STEPS, STEPS)] * job.world_size


def refusals(rank: int, job: Job) -> list[str]:
    engine, _ = build(job)
    errors = []
    requests: list[dict[str, Any]] = [{"return_logits": True}, {"compute_loss": False, "reduce_output": None}]
    for arguments in requests:
        try:
            engine.eval_batch(StepBatches(batches_of(job)), **arguments)
        except ConfigError as error:
            errors.append(str(error).partition(":")[0])
    losses = engine.eval_batch(
        StepBatches(batches_of(job)), reduce_output=None, bcast_loss=False, num_micro_batches=2
    )
    errors.append(str(losses and len(losses)))
    engine.transport.close()
    return errors


def test_evaluations_have_no_logits(ranks: Ranks) -> None:
    results = ranks(2).run(refusals, job_of("1f1b", 2))
    assert results == [["return_logits", "compute_loss", losses] for losses in ("None", "2")]


class CountedEmbedding(GPTEmbedding):
    """Embedding with a buffer."""

    def __init__(self, config: GPTConfig, tp: TensorParallel, parts: int) -> None:
        super().__init__(config, tp, parts)
        self.register_buffer("count", torch.zeros(()))


def error_of_a_buffer(rank: int, job: Job) -> str:
    layers: list[Any] = gpt_layer_specs(job.model, TensorParallel(), DropoutClock())
    in_parts = layers[0].in_parts

    def with_buffer(parts: int) -> TiedLayerSpec:
        spec = in_parts(parts)
        spec.typename = CountedEmbedding
        return spec

    layers[0].in_parts = with_buffer
    with pytest.raises(ConfigError) as caught:
        PipelineModule(layers, job.config(), loss_fn=gpt_loss(job.model, TensorParallel()))
    return str(caught.value)


def test_an_embedding_in_parts_has_only_rows(ranks: Ranks) -> None:
    for error in ranks(2).run(error_of_a_buffer, job_of("1f1b", 2, model=TIED)):
        assert "vocabulary_parallel_head: " in error and "CountedEmbedding" in error


def count_parameters(rank: int, job: Job) -> int:
    engine, _ = build(job)
    engine.transport.close()
    return engine.run_facts["parameters"]


def test_the_plan_counts_the_rows_of_a_tied_head_once(ranks: Ranks) -> None:
    job = job_of("bitpipe_zb", 4, model=replace(TIED, vocab_size=96))
    counts = [ranks(4).run(count_parameters, one) for one in (job, replace(job, head_parts=False))]
    assert counts[0] == counts[1]


def error_of_rows(rank: int, job: Job, frozen: bool) -> str:
    """Treat the rows of the embedding in another way than those of the parts, which have other names."""
    layers = gpt_layer_specs(job.model, TensorParallel(), DropoutClock())
    model = PipelineModule(layers, job.config(), loss_fn=gpt_loss(job.model, TensorParallel()))
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": 0.5},
        {"params": [], "weight_decay": 0.0 if not frozen else 0.5},
    ]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "word_embeddings" not in name)
        groups["word_embeddings" in name]["params"].append(parameter)
    groups = [group for group in groups if any(p.requires_grad for p in group["params"])]
    with pytest.raises(ConfigError) as caught:
        initialize(model=model, config=job.config(), model_parameters=groups)
    return str(caught.value)


@pytest.mark.parametrize("frozen", [False, True])
def test_rows_that_ranks_train_in_different_ways_are_refused(ranks: Ranks, frozen: bool) -> None:
    for error in ranks(2).run(error_of_rows, job_of("1f1b", 2, model=TIED), frozen):
        assert "word_embeddings.weight.1" in error


def test_a_tied_head_needs_an_embedding_in_parts() -> None:
    layers: list[Any] = gpt_layer_specs(TIED, TensorParallel(), DropoutClock())
    body, places = divide_tied_embedding(layers, 2)
    assert len(body) == HEAD and body[0].module_args[-1] == 2
    assert places == [{0: f"word_embeddings.weight.{part}", HEAD + part: "weight"} for part in range(2)]
    twice = [layers[0], *layers]
    del layers[0].in_parts
    for wrong in (layers, twice):
        with pytest.raises(ConfigError, match=r"vocabulary_parallel_head: .*'embed'"):
            divide_tied_embedding(wrong, 2)


def files_of_layers(rank: int, job: Job, folder: str) -> None:
    engine, _ = build(job)
    engine.save_checkpoint(folder, tag="saved")
    engine.transport.close()


def test_a_checkpoint_has_the_rows_of_a_tied_head_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(files_of_layers, job_of("bitpipe_zb", 4, model=TIED), str(tmp_path))
    files = [path.name for path in (tmp_path / "saved").glob("layer_*")]
    rows = [f"layer_00-model_{part:02d}-model_states.pt" for part in range(4)]
    assert sorted(files) == [*rows, *(f"layer_{layer:02d}-model_states.pt" for layer in range(1, HEAD))]


def test_a_loss_function_of_logits_is_refused() -> None:
    layers = gpt_layer_specs(UNTIED, TensorParallel(), DropoutClock())
    assert len(head_parts(layers, gpt_loss(UNTIED, TensorParallel()), 2)) == 2
    with pytest.raises(ConfigError, match=r"vocabulary_parallel_head: loss_fn .*cross_entropy"):
        head_parts(layers, torch.nn.functional.cross_entropy, 2)
