"""Set-up that the training scripts share: checked job plan, model sizes, data, plan text.

Checks that do not need torch run before torch is imported.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.deepspeed_json import precision
from ..config.job import require_section
from ..environment import rank, world_size
from ..errors import ConfigError
from ..launch.job_facts import checksum, setting_facts
from ..launch.launcher import require_restarts
from ..launch.roll_call import Facts
from ..models.config import RopeScaling
from ..parallel.crossing import require_slots
from ..parallel.hosts import Hosts
from ..parallel.partition import BALANCED, end_weights, layer_boundaries, layer_work, stage_weights
from ..planner.auto import model_of_job
from ..planner.job_plan import JobPlan, make_job_plan
from ..planner.job_text import GRID_MICRO_BATCHES, describe
from ..planner.memory import ModelSizes, memory, rank_parameters
from ..planner.stage_costs import repeated_share
from ..planner.traffic import traffic
from .arguments import FLAGS_OF_THE_JSON, finished_json, parse
from .flags import Model
from .hosts import describe_hosts, hosts_of_flags, is_placed, layout_on
from .preflight import check_forward_hosts, check_job

if TYPE_CHECKING:
    from ..engine.batches import MapDataset, MicroBatches

# Flags that may differ between hosts: only rank 0 reads them, or the content of their files is compared.
_PER_HOST = frozenset(
    {
        *("local_rank", "deepspeed", "deepspeed_config", "metrics_file", "dry_run", "write_config", "hosts"),
        *("data_path", "hf_model", "tokenizer", "tokenizer_type", "vocab_file", "merge_file"),
    }
)


# A JSON with one of these keys from flags is printed.
_SHOWN_KEYS = frozenset(
    {"scheduler.params", "tensorboard.output_path", "fp16.loss_scale", "zero_optimization.stage"}
)


def plan_job(prog: str, argv: Sequence[str], model: Model) -> tuple[argparse.Namespace, JobPlan]:
    """Return the flags and the job plan. Raises ConfigError.

    All checks run before a process group is created, cheapest first. ``--write-config`` ends the process. A JSON that
    flags have completed is printed.
    """
    args, job = parse(prog, argv, model)
    if args.write_config or job.flags.keys() & _SHOWN_KEYS or args.deepspeed_config is None:
        _show_json(args, finished_json(prog, argv, model, args, job))
    launched = world_size() > 1 or not args.dry_run
    require_section(job)
    check_job(args, job.deepspeed)
    from ..engine import check_deepspeed

    check_deepspeed(job.deepspeed, job.flags)
    if launched and job.ds_ext.recovery is not None:
        require_restarts()
    hosts = hosts_of_flags(args)
    world = world_size() if launched else hosts and hosts.world_size
    plan = make_job_plan(job, world)
    if not args.data_path:
        raise ConfigError(
            '--data-path: missing. Add it or "train": {"data_path": ...}; `python -m ds_ext prepare` creates data.'
        )
    check_forward_hosts(plan.layout, job.ds_ext.fbd.forward_hosts)
    if args.hosts is not None and hosts is not None:
        require_slots(plan.layout, hosts)
        plan = replace(plan, layout=layout_on(plan.layout, hosts, job.ds_ext.fbd.forward_hosts))
    best = plan.candidates and plan.candidates.best
    if args.recompute_granularity is None:
        args.recompute_granularity = best.recompute if best else "none"
    if args.stage_layers in (None, BALANCED) and best and best.layers:
        args.stage_layers = ",".join(map(str, best.layers))  # those that the planner chose
    return args, plan


def _show_json(args: argparse.Namespace, config: dict[str, Any]) -> None:
    """Print the JSON on rank 0, or write it to the file of ``--write-config`` and end the process.

    Raises ConfigError if the file cannot be written.
    """
    text = json.dumps(config, indent=2)
    if rank() == 0 and args.write_config:
        try:
            Path(args.write_config).write_text(f"{text}\n")
        except OSError as error:
            raise ConfigError(
                f"--write-config: cannot be written (got {args.write_config}: {error.strerror}). Use another path."
            ) from None
        print(f"wrote {args.write_config}", flush=True)
    elif rank() == 0:
        print(f"JSON of this job (--write-config FILE saves it):\n{text}\n", flush=True)
    if args.write_config:
        raise SystemExit(0)


def stage_boundaries(
    args: argparse.Namespace, plan: JobPlan, before: list[str], after: list[str], vocab_size: int
) -> list[int]:
    """Return the layers of every stage; see :func:`ds_ext.parallel.partition.layer_boundaries`. Raises ConfigError."""
    placement, schedule = plan.layout.placement, plan.timetable.schedule
    ends = _ends(args, vocab_size)
    return layer_boundaries(
        args.num_layers, len(before), len(after), placement, schedule, args.stage_layers, ends
    )


def _ends(args: argparse.Namespace, vocab_size: int) -> tuple[float, float] | None:
    """Return the work of embedding and head if --stage-layers includes it."""
    if args.stage_layers != BALANCED:
        return None
    layer = layer_work(
        args.hidden_size,
        args.seq_length,
        heads=args.num_attention_heads,
        ffn=args.ffn_hidden_size,
        query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        swiglu=args.swiglu,
    )
    return end_weights(args.hidden_size, vocab_size, layer, repeated_share(args.recompute_granularity, layer))


def model_sizes(args: argparse.Namespace, plan: JobPlan) -> dict[str, Any]:
    """Return the fields of a TransformerConfig, without the vocabulary. Raises ConfigError."""
    return {
        "num_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "ffn_hidden_size": args.ffn_hidden_size,
        "seq_length": args.seq_length,
        "max_position_embeddings": args.max_position_embeddings,
        "hidden_dropout": args.hidden_dropout,
        "attention_dropout": args.attention_dropout,
        "init_std": args.init_method_std,
        "make_vocab_size_divisible_by": args.make_vocab_size_divisible_by,
        "recompute": args.recompute_granularity,
        "recompute_interval": args.recompute_interval,
        "sequence_parallel": plan.job.ds_ext.sequence_parallel,
        "transformer_impl": args.transformer_impl,
        "seed": args.seed,
        "position_embedding_type": args.position_embedding_type,
        "rotary_base": args.rotary_base,
        "rotary_percent": args.rotary_percent,
        "rope_scaling": _rope_scaling(args),
        "normalization": args.normalization,
        **({} if args.norm_epsilon is None else {"layernorm_epsilon": args.norm_epsilon}),
        "swiglu": args.swiglu,
        "num_query_groups": args.num_query_groups,
        "kv_channels": args.kv_channels,
        "add_bias_linear": not args.disable_bias_linear,
        "add_qkv_bias": args.add_qkv_bias,
        "qk_layernorm": args.qk_layernorm,
        "untie_embeddings_and_output_weights": args.untie_embeddings_and_output_weights,
        "sliding_window": _sliding_window(args.window_size),
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
    }


def _rope_scaling(args: argparse.Namespace) -> RopeScaling | None:
    """Return Llama 3.1's scaling for --use-rope-scaling, with Megatron's constants."""
    if not args.use_rope_scaling:
        return None
    return RopeScaling(
        "llama3",
        args.rope_scaling_factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def _sliding_window(text: str | None) -> int | None:
    """Return the number of tokens of Megatron's window ``"L,R"``, the token itself included. Raises ConfigError."""
    if text is None:
        return None
    match = re.fullmatch(r"\(?\s*(\d+)\s*,\s*0\s*\)?", text)
    if match is None:
        raise ConfigError(
            f"--window-size: must be the number of previous tokens and 0 for following tokens (got {text!r}). Use for "
            f"example 4095,0 for a window of 4096 tokens."
        )
    return int(match[1]) + 1


def job_facts(args: argparse.Namespace, plan: JobPlan, vocab_size: int) -> Facts:
    """Return facts that must be identical on all ranks: JSON, flags, layout, timetable, content of the data."""
    from ..data.meta import fingerprint

    flags = {
        f"--{name.replace('_', '-')}": value
        for name, value in vars(args).items()
        if name not in _PER_HOST | FLAGS_OF_THE_JSON
    }
    section = {key: value for key, value in plan.job.deepspeed.get("ds_ext", {}).items() if key != "train"}
    folder = {}
    if args.hf_model:
        from ..convert.hf_folder import ModelFolder

        folder = {"contents of --hf-model": ModelFolder(Path(args.hf_model)).fingerprint()}
    return {
        **folder,
        **setting_facts({**plan.job.deepspeed, "ds_ext": section}),
        **setting_facts(flags),
        "contents of --data-path": fingerprint(args.data_path),
        "vocabulary": str(vocab_size),
        "layout": checksum([repr(plan.layout.groups()).encode()]),
        "timetable": checksum(" ".join(map(str, order)).encode() for order in plan.timetable.orders),
    }


def micro_batches(
    args: argparse.Namespace,
    plan: JobPlan,
    build: Callable[[tuple[int, int, int]], Sequence[MapDataset]],
) -> tuple[MicroBatches, MicroBatches | None]:
    """Return the micro-batches for training and validation of the whole run.

    The samples for training begin with those that the checkpoint of ``--load`` has consumed, in any batch size.

    Args:
        build: function that returns the train, valid and test datasets for given numbers of samples.
    """
    from ..engine.batches import MicroBatches
    from .checkpoint_fit import position

    batch, size = plan.sizes.train_batch_size, plan.sizes.micro_batch_size
    step, consumed = position(args.load)
    samples = consumed + max(0, args.train_iters - step) * batch
    train, valid, _ = build((samples, args.eval_iters * batch, 0))
    return MicroBatches(train, size), MicroBatches(valid, size) if args.eval_iters else None


def describe_job(
    args: argparse.Namespace,
    plan: JobPlan,
    boundaries: list[int],
    before: list[str],
    after: list[str],
    vocab_size: int,
    token_bytes: int = 0,
    hosts: Hosts | None = None,
) -> str:
    """Return the text of the plan with the names of the layers, the size of a message and the traffic between hosts.

    Args:
        boundaries: from :func:`stage_boundaries`.
        before: names of the layers before the transformer layers.
        after: names of the layers after them.
        token_bytes: bytes per token that a message carries in addition to its activation.
        hosts: hosts of the job; None: unknown.

    Raises:
        ConfigError: the hosts have more or fewer slots than the job has ranks.
    """
    names = [*before, *(f"layer {i}" for i in range(args.num_layers)), *after]
    number_bytes = 4 if precision(plan.job.deepspeed) == "fp32" else 2
    tokens = plan.sizes.micro_batch_size * args.seq_length
    slices = plan.layout.tensor_parallel_size if plan.job.ds_ext.sequence_parallel else 1
    # With sequence parallelism only the activations are sliced.
    message_bytes = tokens // slices * args.hidden_size * number_bytes + tokens * token_bytes
    grid, ends = plan.sizes.micro_batches <= GRID_MICRO_BATCHES, _ends(args, vocab_size)
    layers = [stop - start for start, stop in pairwise(boundaries)]
    layers[0] -= len(before)
    layers[-1] -= len(after)
    sizes = _model_sizes(args, plan, tuple(layers), vocab_size)
    lines = []
    if (
        hosts is not None
        and len(hosts.slots) > 1
        and is_placed(plan.layout, plan.job.ds_ext.fbd.forward_hosts)
    ):
        sent = traffic(sizes, plan.layout.placement, plan.sizes.micro_batches)
        sent = replace(sent, message=message_bytes)
        lines = describe_hosts(plan.layout, hosts, sent, plan.sizes.micro_batches)
        if args.dry_run and args.hosts is None:
            lines.append("note: --hosts: every host is assumed to have as many ranks as the first")
    text = describe(
        plan,
        boundaries=boundaries,
        layer_names=names,
        message_bytes=message_bytes,
        parameters=[round(count) for count in rank_parameters(sizes, plan.layout.placement)],
        memory=memory(plan.timetable, sizes),
        weights=stage_weights(boundaries, len(before), len(after), ends or (0.0, 0.0)),
        with_head=ends is not None,
        grid=grid,
        defers=args.transformer_impl == "local",
        hosts=None if hosts is None else [hosts.host(rank) for rank in range(hosts.world_size)],
    )
    return "\n".join([text, *lines])


def _model_sizes(
    args: argparse.Namespace, plan: JobPlan, layers: tuple[int, ...], vocab_size: int
) -> ModelSizes:
    """Return the sizes of the job's model with the transformer layers of every stage."""
    layout = plan.layout
    sizes = model_of_job(
        plan.job.deepspeed,
        vars(args),
        vocab_size,
        plan.sizes.micro_batch_size,
        layout.tensor_parallel_size,
        layout.data_parallel_size,
    )
    assert sizes is not None, "the flags have all sizes"
    return replace(sizes, layers=layers)
