#!/usr/bin/env python3
"""Pretrain a GPT: ``deepspeed train_gpt.py --deepspeed_config configs/bitpipe.json``.

Read it from top to bottom.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ds_ext import process
from ds_ext.arguments import parse
from ds_ext.deepspeed_sections import precision
from ds_ext.errors import CheckpointError, ConfigError
from ds_ext.plan import Plan, describe, layer_boundaries, make_plan
from ds_ext.preflight import check_job, check_resume

if TYPE_CHECKING:
    from ds_ext.engine.micro_batches import MicroBatches
    from ds_ext.models.gpt import GPTConfig


def main() -> int | None:
    # Everything that can be wrong is found before any process group is made, the cheapest first.
    args, job = parse("train_gpt.py", sys.argv[1:])
    check_job(args, job.deepspeed, job.flags)
    world_size = process.world_size()
    launched = world_size > 1 or not args.dry_run
    plan = make_plan(job, world_size if launched else None)
    if args.recompute_granularity is None:
        chosen = plan.choice and plan.choice.best
        args.recompute_granularity = chosen.recompute if chosen else "none"
    if args.load:
        try:
            check_resume(args.load, plan, world_is_known=launched)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None  # found before anything started: bad input
    # Before the layers come the embedding and the positions, behind them the final norm and the head.
    boundaries = layer_boundaries(
        args.num_layers, 2, 2, plan.layout.placement.stages, plan.timetable.schedule
    )

    from ds_ext.observe.logs import set_up_logging
    from ds_ext.training import Trainer, say, show, shut_down

    set_up_logging()
    model_config = build_model_config(args, plan)
    train, valid = build_data(args, plan)
    text = describe_plan(args, plan, boundaries)
    if args.dry_run:
        return show(text)

    import ds_ext
    from ds_ext.data.meta import read_meta
    from ds_ext.engine import init_distributed
    from ds_ext.models.gpt import gpt_layer_specs, gpt_loss
    from ds_ext.tensor_parallel import DropoutClock, create_tensor_parallel

    init_distributed(job.ds_ext.transport_options.timeout_s)
    say(text)
    tp = create_tensor_parallel(plan.layout.groups()["tensor"])
    clock = DropoutClock()
    model = ds_ext.PipelineModule(
        gpt_layer_specs(model_config, tp, clock),
        job.ds_ext,
        loss_fn=gpt_loss(model_config, tp),
        clock=clock,
        partition_method=boundaries,
    )
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), config=job.deepspeed)
    meta = read_meta(args.data_path) or {}
    floor = ("unigram entropy", meta["unigram_entropy_nats"]) if "unigram_entropy_nats" in meta else None
    tokenizer = meta.get("tokenizer_fingerprint")
    Trainer(engine, args, plan, train, valid, args.seq_length, floor, tokenizer).run()
    shut_down(engine)
    return None


def build_model_config(args: argparse.Namespace, plan: Plan) -> GPTConfig:
    """The model's sizes; its vocabulary is the data's. Raises ConfigError when they do not fit."""
    from ds_ext.models.gpt import GPTConfig

    config = GPTConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        ffn_hidden_size=args.ffn_hidden_size,
        seq_length=args.seq_length,
        max_position_embeddings=args.max_position_embeddings,
        vocab_size=vocab_size(args),
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        init_std=args.init_method_std,
        make_vocab_size_divisible_by=args.make_vocab_size_divisible_by,
        recompute=args.recompute_granularity,
        recompute_interval=args.recompute_interval,
        seed=args.seed,
    )
    config.check_tensor_parallel(plan.layout.tensor_parallel_size)
    return config


def vocab_size(args: argparse.Namespace) -> int:
    """Entries of the tokenizer that the data was made with. Raises ConfigError when another one is given."""
    from ds_ext.data.meta import check_tokenizer, check_vocab_size, read_meta
    from ds_ext.data.tokenizer import load_gpt2_files, load_tokenizer

    if not args.data_path:
        raise ConfigError(
            'no data: give --data-path or "train": {"data_path": ...}. `python -m ds_ext prepare` makes some.'
        )
    meta = read_meta(args.data_path)
    if args.tokenizer or args.vocab_file:
        by_name = args.tokenizer and load_tokenizer(args.tokenizer)
        tokenizer = by_name or load_gpt2_files(args.vocab_file, args.merge_file)
        check_tokenizer(args.data_path, tokenizer)
        size = tokenizer.vocab_size
    elif meta is not None:
        size = meta["vocab_size"]
    else:
        raise ConfigError(
            f"{' '.join(args.data_path)} has no meta.json, so its vocabulary is not known: give --tokenizer, "
            f"or --vocab-file and --merge-file."
        )
    check_vocab_size(args.data_path, size)
    return size


def build_data(args: argparse.Namespace, plan: Plan) -> tuple[MicroBatches, MicroBatches | None]:
    """Training and validation micro-batches, enough for the whole run."""
    from ds_ext.data.gpt import build_gpt_datasets
    from ds_ext.engine.micro_batches import MicroBatches

    step = plan.sizes.train_batch_size
    wanted = (args.train_iters * step, args.eval_iters * step, 0)
    train, valid, _ = build_gpt_datasets(args.data_path, args.split, args.seq_length, wanted, args.seed)
    size = plan.sizes.micro_batch_size
    return MicroBatches(train, size), MicroBatches(valid, size) if args.eval_iters else None


def describe_plan(args: argparse.Namespace, plan: Plan, boundaries: list[int]) -> str:
    """The plan with the names of GPT's layers and the size of its messages."""
    names = ["embedding", "positions", *(f"layer {i}" for i in range(args.num_layers)), "final norm", "head"]
    number_bytes = 4 if precision(plan.job.deepspeed) == "fp32" else 2
    message_bytes = plan.sizes.micro_batch_size * args.seq_length * args.hidden_size * number_bytes
    grid = plan.sizes.micro_batches <= 32
    return describe(plan, boundaries=boundaries, layer_names=names, message_bytes=message_bytes, grid=grid)


if __name__ == "__main__":
    process.run(main)
