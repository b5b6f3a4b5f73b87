"""Start of a training script: flags, JSON and all checks before a process group is created.

Checks that do not need torch run before torch is imported.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ...config.job import AUTO, JobConfig, require_section
from ...environment import local_world_size, rank, world_size
from ...errors import ConfigError, Problems
from ...launch.launcher import require_restarts
from ...model.config import TransformerConfig
from ...model.field_flags import fields_of, flags_of
from ...parallel.crossing import require_slots
from ...parallel.hosts import Hosts
from ...parallel.partition import BALANCED
from ...planner.job_plan import JobPlan, StagePlan, make_stage_plan
from .arguments import finished_json, read_job
from .hosts import hosts_of_flags, layout_on
from .job import Config, TrainingJob, layers_after, stage_boundaries
from .preflight import check_job, set_up_outputs
from .script_flags import Model

# Sizes of the model, whose checks need all of them.
_SIZES = frozenset(
    flag.key for name, flag in flags_of(TransformerConfig).items() if flag.kind is int and name != "seed"
)
# A JSON with one of these keys from flags is printed.
_SHOWN_KEYS = frozenset(
    {"scheduler.params", "tensorboard.output_path", "fp16.loss_scale", "zero_optimization.stage"}
)


def plan_job(
    prog: str,
    argv: Sequence[str],
    model: Model,
    make_config: Callable[[argparse.Namespace, JobConfig | None], Config],
    before: list[str],
    after: list[str],
) -> TrainingJob[Config]:
    """Return the job of a script's command line.

    All checks run before a process group is created. ``--write-config`` ends the process. A JSON that flags have
    completed is printed.

    Args:
        make_config: returns the model's config, for the flags and the JSON; None: the JSON has problems.
        before, after: names of the layers before and after the transformer layers.
    """
    problems = Problems()
    args, job = read_job(prog, argv, model, problems)
    if args.write_config:
        problems.raise_all()
        assert job is not None
        _write_json(args, finished_json(prog, argv, model, args, job))
    if job is not None:
        with problems.collect():
            require_section(job)
    load = args.load
    check_job(args, job and job.deepspeed, problems)
    from .checkpoint_fit import check_load  # imports torch

    config = boundaries = None
    if not problems.undecided & {"hf_model", *_SIZES}:
        with problems.collect():
            config = make_config(args, job)
    plan = None if job is None else _make_plan(args, job, config, problems)
    if plan is not None and config is not None:
        with problems.collect():
            config = replace(config, recompute=args.recompute_granularity or config.recompute)
        with problems.collect():
            _check_splits(args, plan, model)
        with problems.collect():
            config.check_tensor_parallel(plan.layout.tensor_parallel_size)
        with problems.collect():
            if "load" not in problems.undecided:
                check_load(args, config)
        with problems.collect():
            after = layers_after(plan, after)
            boundaries = stage_boundaries(args, plan, before, after, config)
    problems.raise_all()
    assert job is not None and isinstance(plan, JobPlan) and config is not None and boundaries is not None
    if rank() == 0 and (job.flags.keys() & _SHOWN_KEYS or job.path is None):
        # With the folder of a restart, which does not exist at the first start.
        flags = argparse.Namespace(**{**vars(args), "load": load})
        text = json.dumps(finished_json(prog, argv, model, flags, job), indent=2)
        print(f"JSON of this job (--write-config FILE saves it):\n{text}\n", flush=True)
    if not args.dry_run:
        set_up_outputs(args, job.deepspeed)
    return TrainingJob(args, plan, config, before, after, boundaries)


def _make_plan(
    args: argparse.Namespace, job: JobConfig, model: TransformerConfig | None, problems: Problems
) -> StagePlan | None:
    """Return the plan of the job, and set the flags that it decides; with a problem, the part without it.

    Without ``model``, which has problems then, there is no plan for the schedule "auto".
    """
    from ...engine import check_deepspeed

    with problems.collect():
        check_deepspeed(job.deepspeed, job.flags)
    launched, plan = world_size() > 1 or not args.dry_run, None
    with problems.collect():
        if launched and job.ds_ext.recovery is not None:
            require_restarts()
    with problems.collect():
        hosts = hosts_of_flags(args)
        if model is None and job.ds_ext.schedule == AUTO:
            return None
        world = world_size() if launched else hosts and hosts.world_size
        plan = make_stage_plan(job, world, model=model)
        forward_hosts, ranks = job.ds_ext.fbd.forward_hosts, plan.layout.world_size
        if local_world_size(1) == ranks:  # else the ranks check this after an exchange of their names
            layout_on(plan.layout, Hosts((ranks,), (socket.gethostname(),)), forward_hosts)
        if args.hosts is not None and hosts is not None:
            require_slots(plan.layout, hosts)
            plan = replace(plan, layout=layout_on(plan.layout, hosts, forward_hosts))
        _take_candidate(args, plan)
        plan = plan.complete(job)
    return plan


def _check_splits(args: argparse.Namespace, plan: StagePlan, model: Model) -> None:
    settings = plan.settings
    if settings.vocabulary_parallel_head and model == "bert":
        raise ConfigError(
            "ds_ext.vocabulary_parallel_head: BERT's head has a bias and cannot be divided (got true). Remove it."
        )
    if settings.sequence_slices == 1:
        return
    if model == "bert":
        raise ConfigError(
            f"ds_ext.sequence_slices: BERT's tokens attend to later ones (got {settings.sequence_slices}). Use 1."
        )
    if args.transformer_impl == "transformer_engine":
        raise ConfigError(
            f"ds_ext.sequence_slices: needs --transformer-impl local (got {args.transformer_impl} with "
            f"{settings.sequence_slices})."
        )


def _take_candidate(args: argparse.Namespace, plan: StagePlan) -> None:
    """Set the recomputation and the layers of the stages to the planner's choice, unless flags set them."""
    best = plan.candidates and plan.candidates.best
    if args.recompute_granularity is None:
        args.recompute_granularity = best.recompute if best else "none"
    if args.stage_layers in (None, BALANCED) and best and best.layers:
        args.stage_layers = ",".join(map(str, best.layers))


def _write_json(args: argparse.Namespace, config: dict[str, Any]) -> NoReturn:
    if rank() == 0:
        try:
            Path(args.write_config).write_text(f"{json.dumps(config, indent=2)}\n")
        except OSError as error:
            raise ConfigError(
                f"--write-config: cannot be written (got {args.write_config}: {error.strerror}). Use another path."
            ) from None
        print(f"wrote {args.write_config}", flush=True)
    raise SystemExit(0)


def model_fields(args: argparse.Namespace, job: JobConfig | None) -> dict[str, Any]:
    fields = fields_of(TransformerConfig, vars(args))
    return fields | ({"sequence_parallel": job.ds_ext.sequence_parallel} if job else {})
