"""BERT over ranks: every schedule trains to the losses, gradient norms and weights of one plain process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ds_ext.engine import PipelineModule, initialize
from ds_ext.recipes.models.bert import BertConfig, BertLoss, bert_layer_specs
from ds_ext.tensor_parallel import DropoutClock, create_tensor_parallel
from tests.bert_runs import random_bert_batches, train_bert_reference
from tests.engine_runs import StepBatches, digest, weights
from tests.one_process import assert_as_one_process
from tests.ranks import Ranks
from tests.selection import covering

STEPS = 5
MODEL = BertConfig(
    num_layers=8,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    vocab_size=85,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    make_vocab_size_divisible_by=8,
    seed=3,
)


def train(
    rank: int,
    schedule: str,
    pp: int,
    tp: int,
    dp: int,
    model: BertConfig,
    zero: int,
    load: str | None = None,
    save: str | None = None,
) -> dict[str, Any]:
    """Train on this rank with 8 micro-batches a pipeline group, and say what came of it; or load and evaluate only."""
    config = {
        "train_batch_size": 16 * dp,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "ds_ext": {
            "schedule": schedule,
            "pipeline_parallel_size": pp,
            "tensor_parallel_size": tp,
            "sequence_parallel": model.sequence_parallel,
            "transport_options": {"timeout_s": 30},
        },
    }
    world = pp * tp * dp
    tensor = create_tensor_parallel([list(range(first, first + tp)) for first in range(0, world, tp)])
    clock = DropoutClock()
    module = PipelineModule(
        bert_layer_specs(model, tensor, clock),
        config,
        loss_fn=BertLoss(model, tensor),
        clock=clock,
        partition_method="type:BertLayer",
    )
    engine, *_ = initialize(model=module, config=config)
    batches = StepBatches(random_bert_batches(model, STEPS, 8 * dp))
    losses, norms = [], []
    if load is not None:
        engine.load_checkpoint(load)
    for _ in range(STEPS if load is None else 0):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
    found = {"losses": losses, "norms": norms, "weights": weights(engine, tensor), "digest": digest(engine)}
    if save is not None:
        engine.save_checkpoint(save, tag="last")
    batches.step = 0
    found["evaluated"] = float(engine.eval_batch(batches))
    for parts, total in (
        (engine.eval_additional_losses, found["evaluated"]),
        *([(engine.agg_additional_losses, losses[-1])] if losses else []),
    ):
        if model.order_classes is None:
            assert parts is None
            continue
        assert parts is not None and set(parts) == {"masked_words", "sentence_order"}
        assert sum(map(float, parts.values())) == pytest.approx(total, rel=1e-5)
    engine.transport.close()
    return found


@pytest.mark.parametrize(
    ("schedule", "layout", "zero"),
    covering(
        [
            ("bitpipe", (4, 1, 1), 1),
            ("bitpipe_zb", (4, 1, 1), 0),
            ("bitpipe_zb", (2, 2, 1), 0),
            ("1f1b", (2, 1, 2), 1),
        ],
        1,
    ),
)
def test_trains_as_one_process(ranks: Ranks, schedule: str, layout: tuple[int, int, int], zero: int) -> None:
    """With dropout, recomputed layers, padding, and another number of masked words in every micro-batch.

    Attention masks are drawn per tensor-parallel shard, so with TP there is no dropout.
    """
    pp, tp, dp = layout
    model = dataclasses.replace(MODEL, recompute="full", recompute_interval=2)
    if tp > 1:
        model = dataclasses.replace(model, hidden_dropout=0.0, attention_dropout=0.0)
    results = ranks(pp * tp * dp).run(train, schedule, *layout, model, zero, timeout_s=120)
    batches = random_bert_batches(model, STEPS, 8 * dp)
    assert_as_one_process(results, train_bert_reference(model, batches, lr=0.1, momentum=0.9, clip=1.0))
    assert len({result["evaluated"] for result in results}) == 1
    for name in ("0.word_embeddings.weight", "12.bias"):
        tables = [result["weights"][name] for result in results if name in result["weights"]]
        assert tables and not any(table[MODEL.vocab_size :].any() for table in tables)
    if schedule.startswith("bitpipe") and tp == 1:
        assert results[0]["digest"] == results[3]["digest"] != results[1]["digest"] == results[2]["digest"]


def test_sequence_parallel_trains_as_one_process(ranks: Ranks) -> None:
    """The first token, which the sentence head reads, is on the first tensor-parallel rank alone."""
    plain = dataclasses.replace(MODEL, hidden_dropout=0.0, attention_dropout=0.0)
    model = dataclasses.replace(plain, sequence_parallel=True, recompute="selective")
    results = ranks(4).run(train, "bitpipe", 2, 2, 1, model, 0, timeout_s=120)
    batches = random_bert_batches(plain, STEPS, 8)
    assert_as_one_process(results, train_bert_reference(plain, batches, lr=0.1, momentum=0.9, clip=1.0))


def test_masked_words_alone_train_too(ranks: Ranks) -> None:
    """No sentence head: stages at the end of the pipe pass tuples of one."""
    model = dataclasses.replace(MODEL, order_classes=None)
    results = ranks(2).run(train, "bitpipe", 2, 1, 1, model, 0, timeout_s=120)
    batches = random_bert_batches(model, STEPS, 8)
    assert_as_one_process(results, train_bert_reference(model, batches, lr=0.1, momentum=0.9, clip=1.0))


def test_a_checkpoint_is_loaded_under_other_sizes(ranks: Ranks, tmp_path: Path) -> None:
    """The vocabulary is padded to 88 rows on one rank and to 96 on two; the bias of the words as their embeddings."""
    saved = str(tmp_path)
    wrote = ranks(4).run(train, "bitpipe", 4, 1, 1, MODEL, 1, None, saved, timeout_s=120)
    read = ranks(4).run(train, "1f1b", 2, 2, 1, MODEL, 0, saved, timeout_s=120)
    assert read[0]["evaluated"] == pytest.approx(wrote[0]["evaluated"], rel=1e-6)
    before = {name: weight for result in wrote for name, weight in result["weights"].items()}
    for result in read:
        for name, weight in result["weights"].items():
            rows = min(len(weight), len(before[name]))
            assert weight[:rows].equal(before[name][:rows]), name
