"""Bytes of a parameter in memory and in reductions, for the optimizers of DeepSpeed that a pipeline can use.

| precision, ZeRO stage | class in DeepSpeed | weights | gradients | master weights | states |
| --- | --- | --- | --- | --- | --- |
| fp32, 0 | none | 4 | 4 | 0 | 8 |
| fp32, 1 | DeepSpeedZeroOptimizer | 4 | 4 | 4 / R | 8 / R |
| fp16, 0 or 1 | DeepSpeedZeroOptimizer | 2 | 2 | 4 / R | 8 / R |
| bf16, 0 or 1 | BF16_Optimizer | 2 | 2 and fp32 sums, 4 | 4 / R | 8 / R |

R copies of the weights (replicas x data-parallel ranks) share the states. The states are those of Adam (arXiv
1910.02054, section 3.1). ds_ext runs fp16 and bf16 without ZeRO through stage 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import ScheduleError

PRECISIONS = ("bf16", "fp16", "fp32")
# Implementation of Adam -> bytes of its temporary tensors per fp32 element. torch loops over the tensors on CPUs, and
# uses foreach on GPUs by default.
TEMPORARIES: Mapping[str, int] = MappingProxyType({"fused": 0, "foreach": 4, "for-loop": 8})
BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size, and its fixed bucket without ZeRO


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per parameter on a rank.

    Attributes:
        weights: weight that the layers use.
        gradients: gradient, and its fp32 sum over the micro-batches.
        optimizer: fp32 master weight and optimizer states.
        temporaries: temporary tensors of the optimizer step.
        reduced: gradient in a reduction.
        sharded: ``optimizer`` and ``temporaries`` are divided by the copies of the weights.
        bucketed: ZeRO copies the gradients through buckets of a fixed size into fp32 partitions, and frees them before
            the optimizer step.
    """

    weights: int
    gradients: int
    optimizer: int
    temporaries: int
    reduced: int
    sharded: bool
    bucketed: bool


def parameter_bytes(precision: str, zero_stage: int, optimizer: str) -> ParameterBytes:
    """Return the bytes per parameter. ``zero_stage`` has no effect in half precision, which is always sharded."""
    if precision not in PRECISIONS:
        raise ScheduleError(f"precision: unknown (got {precision!r}). Use {', '.join(PRECISIONS)}.")
    if zero_stage not in (0, 1):
        raise ScheduleError(f"zero_stage: pipelines support 0 and 1 (got {zero_stage}).")
    if optimizer not in TEMPORARIES:
        raise ScheduleError(f"optimizer: unknown (got {optimizer!r}). Use {', '.join(TEMPORARIES)}.")
    sharded = zero_stage == 1 or precision != "fp32"
    weight = 4 if precision == "fp32" else 2
    temporaries = TEMPORARIES[optimizer]
    if not sharded and optimizer == "for-loop":
        temporaries = 0  # of one parameter at a time; a partition of ZeRO is one tensor
    return ParameterBytes(
        weights=weight,
        gradients=6 if precision == "bf16" else weight,
        optimizer=12 if sharded else 8,
        temporaries=temporaries,
        reduced=2 if precision == "fp16" else 4,
        sharded=sharded,
        bucketed=sharded and precision != "bf16",
    )
