"""Run jobs on pools of ranks, compare them with one process, and reduce those that fail."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks.rank_pool import RankTimeout
from ds_ext.errors import ConfigError
from tests.ranks import Ranks

from . import reference
from .compare import LISTS, differences
from .job import MIXES_TOKENS, PATIENCE, Job, Layout
from .loss_forms import WITHOUT_COUNTS
from .ranks import train_on_rank
from .reference import Result
from .unusual_layers import Checkpointed
from .zoo import ENDS, ZOO

TIMEOUT_S = 15.0

SAME, REFUSED, INVALID = "same", "refused", "invalid"
DIFFERS, FAILED, HANGS = "differs", "failed", "hangs"
OPTIONS = (  # set to their defaults to reduce a job
    *(
        "start",
        "end",
        "partition",
        "checkpoint_interval",
        "zero",
        "bf16",
        "double",
        "clip",
        "optimizer",
        "data",
        "variable_lengths",
    ),
    *("evaluate_after", "set_weights", "scheduler", "decay_groups", "own_optimizer", "eager_gradient_sync"),
    *("rank_seeds", "audit", "overlap", "empty_first", "resume_rate"),
    *("script", "weights", "fp16", "groups", "by_accumulation", "resume_with", "compiled"),
)
EXPLODES = 1e4  # times the first loss
AUTOGRAD = "autograd"  # key of a refusal by torch
CHANGED_IN_PLACE = "modified by an inplace operation"  # torch's error
FAULTS = (DIFFERS, FAILED, HANGS)


@dataclass
class Outcome:
    """Outcome of a job.

    Attributes:
        kind: SAME; REFUSED: expected ConfigError; INVALID: one process fails too; DIFFERS; FAILED: other error; HANGS.
        lines: details.
    """

    kind: str
    lines: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The text before the first colon of an error."""
        return self.lines[0].partition(":")[0] if self.lines else ""


def run(job: Job, pools: Ranks) -> Outcome:
    """Run a job on the ranks and in one process, and compare."""
    refused = job.must_be_refused
    plain = dataclasses.replace(job, optimizer="sgd") if refused else job
    Checkpointed.starved = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = reference.train(plain)
            noisy = [reference.train(plain, noise_seed=1)]
        except Exception as error:
            return Outcome(INVALID, _lines(error))
    # The inputs of a stage have a gradient, also behind frozen layers.
    if Checkpointed.starved and (job.toggles or job.adds_groups):
        return Outcome(INVALID, ["torch does not train a reentrant checkpoint behind frozen layers"])
    if diverges(expected):
        return Outcome(INVALID, [f"diverges: {expected.losses}"])
    try:
        with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
            results = []
            for part, layout in enumerate(job.layouts):
                pool = pools(layout.ranks.world_size)
                results.append(pool.run(train_on_rank, job, part, folder, timeout_s=TIMEOUT_S * PATIENCE))
    except ConfigError as error:
        return _refusal(job, str(error), expected)
    except RankTimeout as error:
        return Outcome(HANGS, [*_lines(error), *getattr(error, "__notes__", [])])
    except Exception as error:
        if CHANGED_IN_PLACE in str(error):
            return _refusal(job, f"{AUTOGRAD}: {CHANGED_IN_PLACE}", expected)
        of_others = re.search(r"First failure.*?ConfigError: (.*)", str(error))
        if of_others is not None:
            return _refusal(job, of_others[1], expected)
        return Outcome(
            FAILED, [f"{type(error).__name__}: {_lines(error)[0]}", *getattr(error, "__notes__", [])]
        )
    if refused:
        return Outcome(FAILED, [f"{job.optimizer}: was not refused"])
    ranks = results[0] if job.resume is None else _joined(*results)
    lines = differences(job, ranks, expected, noisy)
    for noise_seed in range(2, 10) if job.rounds else (2,):
        if not lines:
            break
        noisy.append(reference.train(plain, noise_seed=noise_seed))
        if job.rounds and is_chaotic(expected, noisy[-1]):
            return Outcome(INVALID, ["rounding errors grow to the size of its numbers"])
        lines = differences(job, ranks, expected, noisy)  # the first rounding errors may have cancelled
    return Outcome(DIFFERS if lines else SAME, lines)


def diverges(result: Result) -> bool:
    """Return whether a job learns nothing: its losses are not finite, or explode."""
    first = max(abs(loss) for loss in [*result.losses[:1], 1e-2])
    return not all(math.isfinite(loss) and abs(loss) <= EXPLODES * first for loss in result.losses)


def is_chaotic(expected: Result, noisy: Result) -> bool:
    """Return whether rounding errors alone change a loss or a norm by a quarter: then no comparison says anything."""
    pairs = [*zip(expected.losses, noisy.losses, strict=True), *zip(expected.norms, noisy.norms, strict=True)]
    return any(e is not None and n is not None and abs(n - e) > 0.25 * abs(e) for e, n in pairs)


def _joined(earlier: list[Result], later: list[Result]) -> list[Result]:
    """Return the results of the ranks of the second layout, with those of the first one before them."""
    outputs = {name: value for result in earlier for name, value in result.state.items()}
    for rank, result in enumerate(later):
        before = earlier[min(rank, len(earlier) - 1)]
        for name in LISTS:
            if rank < len(earlier):
                getattr(result, name)[:0] = getattr(before, name)
            else:  # a rank that only the second layout has
                setattr(result, name, list(getattr(later[0], name)))
        missing: list[Any] = [None] * len(before.rates)
        result.rates[:0] = before.rates if rank < len(earlier) else missing
        result.state |= outputs if rank == 0 else {}
    return later


def _refusal(job: Job, text: str, result: Result) -> Outcome:
    """Return the outcome of a job that was refused: FAILED if it should have trained.

    Args:
        text: text of the error.
        result: result of one process.
    """
    kinds, key = [ZOO[name] for name in job.blocks], text.partition(":")[0]
    tensor_parallel = any(layout.tp > 1 for layout in job.layouts)
    expected = {
        AUTOGRAD: any(kind.changes_saved for kind in kinds),
        "schedule": any(kind.changes_saved or kind.inner_backward for kind in kinds),
        "zero_optimization.stage": any("complex" in name for name in (*job.blocks, job.start))
        or (job.zero > 0 and (job.has_doubles or job.is_mixed)),
        "data": job.data == "unequal",
        # Without an input that has a gradient, reentrant checkpoints get none, also in one process.
        "activation_checkpoint_func": "checkpointed_reentrant" in job.blocks,
        "sequence_slices": job.is_sliced
        and (
            bool({*job.blocks, job.end} & {*MIXES_TOKENS, "output_pair", "transposed"})
            or ENDS[job.end].metric
        ),
        "loss_fn": (job.is_sliced and not ENDS[job.end].pairs)
        or ENDS[job.end].metric
        or ((job.half or job.is_mixed) and job.end in WITHOUT_COUNTS)
        or 0.0 in result.norms,
        "ds_ext.audit_interval": job.is_sliced and job.audit,
        "data_iter": any(layout.schedule == "chimera" for layout in job.layouts),
        "optimizer": job.must_be_refused,
        "train_batch_size": job.by_accumulation
        # The script counts the data-parallel ranks of 1f1b.
        and any(layout.pipes != layout.ranks.world_size // (layout.pp * layout.tp) for layout in job.layouts),
        "fp16.enabled": job.fp16 and not get_accelerator().is_fp16_supported(),
    }
    divided = "experts_2" in job.blocks or ("experts_1" in job.blocks and tensor_parallel)
    refused = (
        expected.get(key)
        or (divided and "DeepSpeedExperts" in key)
        or any(action.refuses(job, key) for action in job.script)
    )
    return Outcome(REFUSED if refused else FAILED, [text.splitlines()[0]])


def _lines(error: BaseException) -> list[str]:
    return (str(error) or type(error).__name__).splitlines()[:1] or [""]


def reduce(job: Job, pools: Ranks, outcome: Outcome, attempts: int) -> tuple[Job, Outcome]:
    """Return a smaller job with the same kind of outcome, and its outcome.

    Args:
        attempts: maximum number of runs.
    """
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(job):
            if attempts == 0:
                return job, outcome
            attempts -= 1
            result = run(candidate, pools)
            if result.kind == outcome.kind and (result.kind != FAILED or result.key == outcome.key):
                job, outcome, smaller = candidate, result, True
                break
    return job, outcome


def _smaller(job: Job) -> Iterator[Job]:
    """Yield reproducible jobs with fewer options or simpler blocks, those with the largest changes first."""
    stages = max(layout.placement.stages for layout in job.layouts)
    for candidate in _candidates(job):
        layouts = candidate.layouts
        if (
            candidate != job
            and candidate.is_reproducible
            and all(layout.supports(candidate.micro_batches) for layout in layouts)
            and candidate.num_layers >= stages
            and candidate.steps > 0
        ):
            yield candidate


def _candidates(job: Job) -> Iterator[Job]:
    change = functools.partial(dataclasses.replace, job)
    plain = Job()
    defaults = {name: getattr(plain, name) for name in OPTIONS}
    if job.resume is not None:
        alone = {"resume": None, "resume_rate": 1.0, "resume_with": ""}
        compiled = "both" if job.compiled in ("first", "second") else job.compiled
        yield change(**alone, set_weights=job.set_weights.replace("save", "load"), compiled=compiled)
    yield change(**defaults)
    uniform = functools.partial(change, partition="uniform")
    yield uniform(blocks=("linear",) * len(job.blocks))
    for name in sorted({*job.blocks} - {"linear"}):
        yield uniform(blocks=tuple(block if block == name else "linear" for block in job.blocks))
    for layout in _smaller_layouts(job.layout):
        yield uniform(layout=layout)
    for name, value in defaults.items():
        yield change(**{name: value})
    for index, action in enumerate(job.script):
        others = (*job.script[:index], *job.script[index + 1 :])
        yield change(script=others)
        for smaller in action.smaller():
            yield change(script=(*others[:index], smaller, *others[index:]))
    for length in (len(job.blocks) // 2, len(job.blocks) - 1):
        yield uniform(blocks=job.blocks[:length])
        yield uniform(blocks=job.blocks[-length:])
    for index, name in enumerate(job.blocks):
        if name != "linear":
            yield uniform(blocks=(*job.blocks[:index], "linear", *job.blocks[index + 1 :]))
    if job.resume is None:
        for steps in (1, job.steps - 1):
            yield change(steps=steps, evaluate_after=job.evaluate_after and min(job.evaluate_after, steps))
    for micro_batches in range(1, job.micro_batches):
        yield change(micro_batches=micro_batches)
    yield change(micro_batch_size=1)


def _smaller_layouts(layout: Layout) -> Iterator[Layout]:
    for slices in (1, 2):
        yield dataclasses.replace(layout, slices=slices)
    if layout.head_parts:
        yield dataclasses.replace(layout, head_parts=False)
    if layout.tp > 1:
        yield dataclasses.replace(layout, tp=1)
    if layout.dp > 1:
        yield dataclasses.replace(layout, dp=1)
    if layout.schedule not in ("1f1b", "gpipe"):
        yield dataclasses.replace(layout, schedule="1f1b", options={}, backward_per_forward=1)
    if layout.pp > 2:
        yield dataclasses.replace(layout, pp=2)
    if layout.pp == 2 and layout.schedule not in ("bitpipe", "bitpipe_zb", "chimera", "fbd"):
        yield dataclasses.replace(layout, pp=1)
