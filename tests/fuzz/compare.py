"""Comparison of the results of the ranks with the results of one process."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .actions import Hook
from .job import Job
from .reference import Result

FP32_TOLERANCE = 1e-5
# bf16 has 8 significant bits: neighbours differ by 2^-7 of their size at most.
BF16_TOLERANCE = 2.0**-6
FP16_TOLERANCE = 2.0**-8
LISTS = (
    "losses",
    "norms",
    "evaluations",
    "additional",
)  # of results, with a number for each step or evaluation
# Tolerance in units of the effect of rounding errors, which is better known in half precision.
SENSITIVITY, HALF_SENSITIVITY = 20, 3


def differences(job: Job, ranks: Sequence[Result], reference: Result, noisy: Sequence[Result]) -> list[str]:
    """Return one line for each result that differs.

    A tolerance is relative to the largest entry of a tensor, and is larger where rounding errors have a larger effect.

    Args:
        ranks: results by rank.
        reference: result of one process.
        noisy: the same with rounding errors, once for each set of them. The largest effect counts: a step of Adam can
            have one of two lengths, and each set of errors decides for some parameters.
    """
    base, factor = FP32_TOLERANCE, SENSITIVITY
    if job.rounds:
        factor = HALF_SENSITIVITY
        # A head in parts computes its losses in fp32, and a whole one those of fp16 logits in fp16.
        in_fp16 = job.half == "fp16" and not any(layout.head_parts for layout in job.layouts)
        base = FP16_TOLERANCE if in_fp16 else BF16_TOLERANCE
    lines = []
    for name in LISTS:
        expected, with_noise = getattr(reference, name), [getattr(result, name) for result in noisy]
        for rank, result in enumerate(ranks):
            actual = getattr(result, name)
            if not _numbers_agree(actual, expected, with_noise, base, factor):
                lines.append(f"{name} of rank {rank}: {actual}, one process: {expected}")
                break
    for rank, result in enumerate(ranks):
        if not all(_rates_agree(*rates) for rates in zip(result.rates, reference.rates, strict=True)):
            lines.append(f"rates of rank {rank}: {result.rates}, one process: {reference.rates}")
            break
    lines += _calls(job, ranks, reference)
    for rank, result in enumerate(ranks):
        for name, actual in result.state.items():
            whole, _, part = name.partition("#")
            expected = reference.state.get(whole)
            if expected is None:
                lines.append(f"{name} of rank {rank}: is not in the state of one process")
                continue
            with_noise = [result.state[whole] for result in noisy]
            if part:
                rows = slice(int(part) * len(actual), (int(part) + 1) * len(actual))
                expected, with_noise = expected[rows], [tensor[rows] for tensor in with_noise]
                actual = actual[: len(expected)]  # the others are padding
            problem = _difference(actual, expected, with_noise, base, factor)
            if problem is not None:
                lines.append(f"{name} of rank {rank}: {problem}")
    missing = set(reference.state) - {name.partition("#")[0] for result in ranks for name in result.state}
    return lines + [f"{name}: on no rank" for name in sorted(missing)]


def _rates_agree(actual: list[float] | None, expected: list[float] | None) -> bool:
    if actual is None or expected is None:
        return True
    pairs = zip(actual, expected, strict=False)
    return len(actual) == len(expected) and all(
        math.isnan(e) or math.isclose(a, e, rel_tol=1e-6) for a, e in pairs
    )


def _calls(job: Job, ranks: Sequence[Result], reference: Result) -> list[str]:
    """Return one line for each hook that was not called as often as in one process."""
    plain = all(layout.schedule != "fbd" and layout.num_slices == 1 for layout in job.layouts)
    if job.checkpoint_interval or job.audit or job.resume is not None or not plain:
        return []  # layers run again, or in parts
    lines = []
    for action, expected in reference.calls.items():
        actual = sum(result.calls.get(action, 0) for result in ranks) / job.layout.tp
        if isinstance(action, Hook) and action.counted(job) and actual != expected:
            lines.append(f"calls of {action}: {actual:g}, one process: {expected}")
    return lines


def _numbers_agree(
    actual: Sequence[float | None],
    expected: Sequence[float | None],
    noisy: Sequence[Sequence[float | None]],
    base: float,
    factor: float,
) -> bool:
    if len(actual) != len(expected):
        return False
    for a, e, *with_noise in zip(actual, expected, *noisy, strict=True):
        if a is None:  # the optimizer does not measure the norm
            continue
        assert e is not None
        spread = max(abs(n - e) for n in with_noise if n is not None)
        if math.isfinite(e) and not abs(a - e) <= base * max(abs(e), 1e-3) + factor * spread:
            return False
    return True


def _difference(
    actual: Tensor, expected: Tensor, noisy: Sequence[Tensor], base: float, factor: float
) -> str | None:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{actual.dtype} {tuple(actual.shape)}, one process: {expected.dtype} {tuple(expected.shape)}"
    if not expected.numel():
        return None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, e = actual.to(wide), expected.to(wide)
    if not e.isfinite().all():
        return None
    error, spread = float((a - e).abs().max()), max(float((n.to(wide) - e).abs().max()) for n in noisy)
    tolerance = base * max(float(e.abs().max()), 1e-2) + factor * spread
    return None if error <= tolerance else f"differs by {error:.3g} (tolerance {tolerance:.3g})"
