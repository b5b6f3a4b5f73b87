#!/usr/bin/env python3
"""Pretrain a BERT: ``deepspeed train_bert.py --deepspeed_config configs/bert_bitpipe.json``.

The losses are those of masked words and of the order of two segments. The code reads from top to bottom.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ds_ext.config.job import JobConfig
from ds_ext.environment import restart_count
from ds_ext.launch import process, stop
from ds_ext.recipes.training.hosts import hosts_of_flags
from ds_ext.recipes.training.setup import model_fields, plan_job

if TYPE_CHECKING:
    from ds_ext.engine.batches import MapDataset
    from ds_ext.recipes.data.bert import BertOptions  # imports torch
    from ds_ext.recipes.models.bert import BertConfig

BEFORE, AFTER = ["embedding", "positions and types"], ["heads", "words", "bias"]
PADDING_MASK_BYTES = 1  # per token, in every message of an activation


def main() -> int:
    """Train, or print the plan of a dry run. Returns the exit code."""
    job = plan_job("train_bert.py", sys.argv[1:], "bert", bert_config, BEFORE, AFTER)
    args, config = job.args, job.model

    from ds_ext.recipes.data.bert import bert_tokenizer, build_bert_datasets
    from ds_ext.recipes.training.loop import Trainer, say, show, shut_down

    process.set_up_logging()
    options = bert_options(args)
    tokenizer = bert_tokenizer(args.data_path, args.tokenizer) if args.data_path else None
    job = job.with_stage_work()

    def datasets(samples: tuple[int, int, int]) -> Sequence[MapDataset]:
        assert tokenizer is not None
        sizes = args.seq_length, samples, args.seed
        return build_bert_datasets(args.data_path, args.split, *sizes, tokenizer, options)

    train, valid = job.micro_batches(datasets)
    if args.dry_run or tokenizer is None:
        return show(job.describe(hosts_of_flags(args), PADDING_MASK_BYTES))

    import ds_ext
    from ds_ext.engine import (
        check_precision,
        hosts_of_job,
        init_distributed,
        on_hosts,
        weight_decay_groups,
    )
    from ds_ext.recipes.data.meta import read_meta
    from ds_ext.recipes.models.bert import BertLoss, bert_layer_specs
    from ds_ext.tensor_parallel import DropoutClock, create_tensor_parallel

    settings = job.plan.settings
    check_precision(job.plan.job)
    init_distributed(settings.transport_options.timeout_s, job.facts())
    plan = replace(job.plan, layout=on_hosts(job.plan.layout, settings.fbd.forward_hosts))
    job = replace(job, plan=plan)
    job.check_memory()
    if settings.print_plan and restart_count() == 0:
        say(job.describe(hosts_of_job(), PADDING_MASK_BYTES))
    tp = create_tensor_parallel(plan.layout.groups()["tensor"])
    clock = DropoutClock()
    model = ds_ext.PipelineModule(
        bert_layer_specs(config, tp, clock),
        plan,
        loss_fn=BertLoss(config, tp),
        clock=clock,
        partition_method=job.boundaries,
    )
    engine, *_ = ds_ext.initialize(model=model, model_parameters=weight_decay_groups(model))
    meta = read_meta(args.data_path) or {}
    # Loss of a model that predicts each word by its frequency and the order of the segments at random.
    floor = None
    if "unigram_entropy_nats" in meta:
        coin = math.log(2) if options.binary_head else 0.0
        floor = ("unigram entropy" + " plus ln 2" * options.binary_head, meta["unigram_entropy_nats"] + coin)
    code = Trainer(engine, args, plan, config, train, valid, floor, tokenizer.fingerprint).run()
    shut_down(engine)
    return code


def bert_options(args: argparse.Namespace) -> BertOptions:
    """Return the settings of the samples. Raises ConfigError."""
    from ds_ext.recipes.data.bert import BertOptions

    return BertOptions(args.mask_prob, args.short_seq_prob, not args.bert_no_binary_head)


def bert_config(args: argparse.Namespace, job: JobConfig | None) -> BertConfig:
    """Return the config of the model. Raises ConfigError. A dry run without data assumes BERT's vocabulary."""
    from ds_ext.recipes.data.bert import bert_tokenizer
    from ds_ext.recipes.models.bert import BertConfig

    classes, size = 2 if bert_options(args).binary_head else None, 30522
    if args.data_path or args.tokenizer:
        size = bert_tokenizer(args.data_path, args.tokenizer).vocab_size
    else:
        args.notes.append(f"vocab     {size}, that of bert-base-uncased (assumed)")
    return BertConfig(**model_fields(args, job), vocab_size=size, order_classes=classes)


if __name__ == "__main__":
    stop.listen_early(sys.argv[1:])  # the imports of torch and DeepSpeed take seconds
    process.run(main)
