"""Habits of scripts: each changes a drawn job, by an action or by what the script builds, passes or loads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from . import job as jobs
from .actions import ACTIONS
from .decoder_layers import DECODERS
from .habit_layers import EXPERT_LAYERS, MIXED, TIES
from .job import GROUPS, MAX_RANKS, Job
from .loss_forms import LOSS_FORMS
from .scripts import Action
from .zoo import ENDS, STARTS

Habit = Callable[[Random, Job], "Job | None"]


def _action(action: type[Action], random: Random, job: Job) -> Job | None:
    drawn = action.draw(random, job)
    return None if drawn is None else replace(job, script=(*job.script, drawn))


def _with_blocks(random: Random, job: Job, names: Sequence[str], count: int = 1) -> Job:
    """Return the job with other blocks among or behind its own."""
    blocks = [*job.blocks]
    for _ in range(count):
        blocks.insert(random.randrange(len(blocks) + 1), random.choice(names))
    partition = job.partition if isinstance(job.partition, str) else "uniform"
    return replace(job, blocks=tuple(blocks), partition=partition)


def _train_bit_by_bit(random: Random, job: Job) -> Job | None:
    """Freeze layers and train them later, or the other way round."""
    first = _action(ACTIONS["Toggle"], random, job)
    return None if first is None else _action(ACTIONS["Toggle"], random, first)


def _half_weights(random: Random, job: Job) -> Job | None:
    weights = random.choice(("bf16", "bf16", "fp16"))
    section = random.choice(("", "", "", "bf16"))
    zero = random.choice((0, 1, 1))
    return replace(job, weights=weights, bf16=section == "bf16", double=False, zero=zero, overlap=False)


def _half_json(random: Random, job: Job) -> Job | None:
    return replace(job, fp16=True, bf16=False, double=False)


def _mixed_weights(random: Random, job: Job) -> Job | None:
    half = random.random() < 0.6
    names = [name for name in MIXED if not half or name.startswith("fp32")]
    job = _with_blocks(random, job, names, random.choice((1, 1, 2)))
    return _half_weights(random, job) if half else replace(job, double=False)


def _other_samples(random: Random, job: Job) -> Job | None:
    if ENDS[job.end].start is not None:
        return None
    names = [name for name, start in STARTS.items() if start.dtype is not None]
    return replace(job, start=random.choice(names))


def _ties(random: Random, job: Job) -> Job | None:
    return _with_blocks(random, job, TIES, random.choice((1, 1, 2)))


def _experts(random: Random, job: Job) -> Job | None:
    layout = replace(job.layout, dp=random.choice((1, 2))) if job.layout.ranks.world_size <= 2 else job.layout
    if not layout.supports(job.micro_batches):
        return None
    # DeepSpeed itself needs named groups for experts.
    job = replace(job, layout=layout, clip=random.choice((0.05, 1.0)), decay_groups=False, groups="")
    return _with_blocks(random, job, EXPERT_LAYERS)


def _shards(random: Random, job: Job) -> Job | None:
    if MAX_RANKS * job.layout.tp // job.layout.ranks.world_size < 2:
        return None
    layout = replace(job.layout, tp=2, head_parts=False)  # the ends are not sharded
    job = replace(job, layout=layout, double=job.double and random.random() < 0.5)
    return _with_blocks(random, job, [*DECODERS], random.choice((1, 1, 2)))


def _end(random: Random, job: Job, names: Sequence[str]) -> Job | None:
    if ENDS[job.end].start is not None:
        job = replace(job, start="tokens")
    layouts = {"layout": replace(job.layout, head_parts=False)}
    if job.resume is not None:
        layouts["resume"] = replace(job.resume, head_parts=False)
    return _filled(replace(job, **layouts, end=random.choice(names)))


def _filled(job: Job) -> Job:
    """Return the job with a layer for every stage."""
    missing = max(layout.placement.stages for layout in job.layouts) - job.num_layers
    partition = job.partition if isinstance(job.partition, str) else "uniform"
    return replace(job, blocks=(*job.blocks, *["linear"] * missing), partition=partition)


def _groups(random: Random, job: Job) -> Job | None:
    groups = random.choice([name for name in GROUPS if name])
    scheduler = random.choice(("", "script", "lambdas", "lambdas"))
    job = replace(job, groups=groups, scheduler=scheduler, decay_groups=False, overlap=False)
    return _action(ACTIONS["EditGroup"], random, job) if random.random() < 0.6 else job


def _accumulation(random: Random, job: Job) -> Job | None:
    return replace(job, by_accumulation=True)


def _resumed(random: Random, job: Job) -> Job | None:
    """Return the job with a resume, in another layout if it has none."""
    if job.resume is not None:
        return job
    resume = jobs.draw_layout(random)
    fits = resume.supports(job.micro_batches) and resume.placement.stages <= job.num_layers
    if not fits or not isinstance(job.partition, str) or job.steps == 1:
        return None
    after = random.randrange(1, job.steps)
    return replace(job, resume=resume, resume_after=after, resume_rate=random.choice((1.0, 0.5)))


def _partial_load(random: Random, job: Job) -> Job | None:
    resumed = _resumed(random, job)
    if resumed is None:
        return None
    how = random.choice(("module_only", "no_optimizer", "not_strict", "own_file"))
    return replace(resumed, resume_with=how, scheduler="")


def _compiled(random: Random, job: Job) -> Job | None:
    # Compilation takes seconds on every rank.
    blocks = [block if block in COMPILED else random.choice(COMPILED) for block in job.blocks]
    partition = job.partition if isinstance(job.partition, str) else "uniform"
    job = _filled(replace(job, blocks=tuple(blocks), partition=partition))
    compiled = random.choice(("both", "engine", "first", "first", "second", "second"))
    resumed = _resumed(random, job) if compiled in ("first", "second") else job
    return resumed and replace(resumed, compiled=compiled)


def _checkpointed(random: Random, job: Job) -> Job | None:
    return _with_blocks(random, job, ("checkpointed", "checkpointed_reentrant"), random.choice((1, 2, 3)))


def _closure(random: Random, job: Job) -> Job | None:
    return replace(job, optimizer="lbfgs", own_optimizer=True, scheduler="", groups="", decay_groups=False)


METRICS = tuple(name for name, end in LOSS_FORMS.items() if end.metric)
FORMS = tuple(name for name, end in LOSS_FORMS.items() if not end.metric)
HABITS: dict[str, Habit] = {
    **{name: functools.partial(_action, action) for name, action in ACTIONS.items()},
    "bit_by_bit": _train_bit_by_bit,
    "half_weights": _half_weights,
    "half_json": _half_json,
    "mixed_weights": _mixed_weights,
    "other_samples": _other_samples,
    "ties": _ties,
    "experts": _experts,
    "shards": _shards,
    "metrics": functools.partial(_end, names=METRICS),
    "loss_forms": functools.partial(_end, names=FORMS),
    "groups": _groups,
    "accumulation": _accumulation,
    "partial_load": _partial_load,
    "compiled": _compiled,
    "checkpointed": _checkpointed,
    "closure": _closure,
}
COMPILED = ("linear", "mlp", "layer_norm", "rms_norm")
RARE = ("closure", "half_json", "accumulation")  # refused, which a few jobs show


def draw(seed: int, wanted: Sequence[str] = ()) -> Job | None:
    """Draw the job of a seed, and habits of its script.

    Args:
        wanted: names of habits, of which the job has one and no other; None is returned if it does not fit the job.
    """
    random = Random(-3 - seed)
    job = jobs.draw(seed)
    if wanted:
        return _with_habit(random, job, random.choice(wanted))
    if random.random() < 0.25:
        return job
    names = [name for name in HABITS if name not in RARE or random.random() < 0.3]
    for name in random.sample(names, random.choice((1, 1, 2, 3))):
        job = _with_habit(random, job, name) or job
    return job


def _with_habit(random: Random, job: Job, name: str) -> Job | None:
    changed = HABITS[name](random, job)
    if changed is None:
        return None
    if changed.num_layers != job.num_layers and not isinstance(changed.partition, str):
        changed = replace(changed, partition="uniform")
    if not changed.is_reproducible:
        return None
    stages = max(layout.placement.stages for layout in changed.layouts)
    return changed if changed.num_layers >= stages else None
