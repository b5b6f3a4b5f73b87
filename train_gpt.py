#!/usr/bin/env python3
"""Pretrain a GPT: ``deepspeed train_gpt.py --deepspeed_config configs/bitpipe.json``.

The code reads from top to bottom.
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ds_ext.config.job import JobConfig
from ds_ext.environment import restart_count
from ds_ext.errors import ConfigError
from ds_ext.launch import process, stop
from ds_ext.parallel.hosts import Hosts
from ds_ext.recipes.training.hosts import hosts_of_flags
from ds_ext.recipes.training.setup import model_fields, plan_job

if TYPE_CHECKING:
    from ds_ext.recipes.models.gpt import GPTConfig  # imports torch

BEFORE, AFTER = ["embedding", "positions"], ["final norm", "head"]
START_BYTES = 8  # start of a token's document, int64


def main() -> int:
    """Train, or print the plan of a dry run. Returns the exit code."""
    job = plan_job("train_gpt.py", sys.argv[1:], "gpt", gpt_config, BEFORE, AFTER)
    args, config = job.args, job.model

    from ds_ext.recipes.data.chat.dataset import pad_conversations
    from ds_ext.recipes.data.gpt import build_gpt_datasets, describe_data, mean_tokens, samples_per_epoch
    from ds_ext.recipes.training.documents import document_options
    from ds_ext.recipes.training.layers import make_builder
    from ds_ext.recipes.training.loop import Trainer, say, show, shut_down

    process.set_up_logging()
    options = document_options(args)
    builder = make_builder(args, job.plan, config)
    job = job.with_stage_work(builder.divides_head)
    settings = job.plan.settings
    datasets = functools.partial(build_gpt_datasets, args.data_path, args.split, args.seq_length)
    length = args.seq_length if settings.sequence_slices > 1 else 0  # slices need samples of one length
    shares = settings.tensor_parallel_size if config.sequence_parallel else 1
    collate = None if options.packs else functools.partial(pad_conversations, length=length, multiple=shares)
    train, valid = job.micro_batches(lambda samples: datasets(samples, args.seed, options), collate)
    token_bytes = START_BYTES if config.packed else 0
    args.notes += describe_data(train.dataset)

    def describe(hosts: Hosts | None) -> str:
        return job.describe(hosts, token_bytes, builder.weights)

    if args.dry_run:
        return show(describe(hosts_of_flags(args)))

    import ds_ext
    from ds_ext.engine import (
        check_precision,
        hosts_of_job,
        init_distributed,
        on_hosts,
        weight_decay_groups,
    )
    from ds_ext.recipes.data.meta import read_meta
    from ds_ext.tensor_parallel import create_tensor_parallel

    check_precision(job.plan.job)
    init_distributed(settings.transport_options.timeout_s, job.facts())
    plan = replace(job.plan, layout=on_hosts(job.plan.layout, settings.fbd.forward_hosts))
    job = replace(job, plan=plan)
    job.check_memory()
    if settings.print_plan and restart_count() == 0:
        say(describe(hosts_of_job()))
    tp = create_tensor_parallel(plan.layout.groups()["tensor"])
    model = builder.module(plan, job.boundaries, tp)
    engine, *_ = ds_ext.initialize(model=model, model_parameters=weight_decay_groups(model))
    builder.load(engine)
    meta = read_meta(args.data_path) or {}
    floor = None
    if "unigram_entropy_nats" in meta:
        floor = ("unigram entropy", meta["unigram_entropy_nats"])
    tokenizer, epoch = meta.get("tokenizer_fingerprint"), samples_per_epoch(train.dataset)
    sizes = replace(config, seq_length=round(mean_tokens(train.dataset)) or config.seq_length)
    trainer = Trainer(engine, args, plan, sizes, train, valid, floor, tokenizer, epoch)
    code = trainer.run()
    builder.finish(engine)
    shut_down(engine)
    return code


def gpt_config(args: argparse.Namespace, job: JobConfig | None) -> GPTConfig:
    """Return the config of the model. Raises ConfigError."""
    from ds_ext.recipes.models.gpt import GPTConfig
    from ds_ext.recipes.training.documents import document_options
    from ds_ext.recipes.training.experts import take_experts
    from ds_ext.recipes.training.hf_model import config_of_model, folder_sizes

    if args.transformer_impl == "transformers" and not (args.hf_model or args.num_experts):
        raise ConfigError(
            "--transformer-impl: transformers needs a model (got no --hf-model). Add it, or use local."
        )
    document_options(args)  # chat data sets flags of the model
    vocabulary = None
    if args.num_experts:
        vocabulary = vocab_size(args)
        take_experts(args, GPTConfig(**{**model_fields(args, job), "vocab_size": vocabulary}))
    sizes = folder_sizes(config_of_model(Path(args.hf_model), args.transformer_impl)) if args.hf_model else {}
    return GPTConfig(**{**model_fields(args, job), **sizes, "vocab_size": vocabulary or vocab_size(args)})


def vocab_size(args: argparse.Namespace) -> int:
    """Return --vocab-size, or that of the data's tokenizer. Raises ConfigError for a different tokenizer.

    A dry run without data assumes GPT-2's.
    """
    from ds_ext.recipes.data.meta import check_one_tokenizer, check_tokenizer, check_vocab_size, read_meta
    from ds_ext.recipes.data.tokenizer import flagged_tokenizer

    meta = read_meta(args.data_path)
    if meta is not None and "sentences" in meta:
        raise ConfigError(
            f"--data-path: data for BERT, without end-of-document tokens (got {' '.join(args.data_path)}). Prepare "
            f"data for GPT with `python -m ds_ext prepare --output FOLDER`, or use train_bert.py."
        )
    tokenizer = flagged_tokenizer(args)
    if tokenizer is not None:
        check_tokenizer(args.data_path, tokenizer)
        size = tokenizer.vocab_size
    elif meta is not None:
        check_one_tokenizer(args.data_path)
        size = meta["vocab_size"]
    elif args.vocab_size:
        size = args.vocab_size
    elif not args.data_path:
        size = 50257
        args.notes.append(f"vocab     {size}, that of GPT-2 (assumed, --vocab-size sets it)")
    else:
        raise ConfigError(
            f"--data-path: no meta.json with the vocabulary (got {' '.join(args.data_path)}). Add --tokenizer, or "
            f"--vocab-file and --merge-file."
        )
    size = args.vocab_size or size
    check_vocab_size(args.data_path, size)
    return size


if __name__ == "__main__":
    stop.listen_early(sys.argv[1:])  # the imports of torch and DeepSpeed take seconds
    process.run(main)
