"""FBD: forwards and backwards on separate devices (MegaFBD, "forward-backward disaggregation"). ::

    device 0  0  1  2  3  .  .  .  .  .  .  .  .  .  .  .
    device 1  0* .  .  .  0'--- 1* 1'--- 2* 2'--- 3* 3'---
    device 2  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .
    device 3  .  0* 0'--- 1* 1'--- 2* 2'--- 3* 3'--- .  .

A forward device computes without an autograd graph. It sends its output to the forward device and to the backward
device of the next stage. A backward device repeats the forward of its stage with a graph (``0*``) and computes the
backward as soon as the gradient arrives, so it keeps the activations of at most one micro-batch. The forward device of
the last stage is idle in training. The forward devices serve ``k`` = ``backward_per_forward`` pipes of backward
devices, which are replicas of each other.

Device (1 + k)s computes the forwards of stage s, and devices (1 + k)s + 1 ... (1 + k)s + k its backwards. A step takes
(P - 1)f + N/k (f + b + w) + (P - 1)(b + w) on 1 + k times the devices of a plain pipeline of P stages. In the time in
which each of its k backward devices spends f + b + w, a forward device spends kf. FBD is worth its extra devices if
forward devices are up to (f + b + w)/(kf) times slower, if one forward rank replaces TP ranks, or if a plain pipeline
would not have enough memory for its activations. Otherwise, a plain pipeline on all of the devices is faster.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import ScheduleError
from ..definition import Option
from ..ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op
from ..placement import ForwardPipe, Placement
from ..registry import schedule

_WHOLE, _SPLIT = "whole", "split"
_OPTIONS = {
    "backward_per_forward": Option(1, 1, "backward pipelines per forward pipeline"),
    "merge_forward_tensor_parallel": Option(
        1, 1, "tensor-parallel ranks that one forward rank replaces; 1: no merging"
    ),
    "forward_slowdown": Option(
        1.0, 0, "time of a forward device relative to a backward device for the same work"
    ),
    "backward": Option(_WHOLE, None, "split: separate input and weight gradients", (_WHOLE, _SPLIT)),
}


def disaggregated(
    num_devices: int, backward_per_forward: int, merge_forward_tensor_parallel: int, forward_slowdown: float
) -> Placement:
    """Return P stages on P forward devices and k x P backward devices."""
    if num_devices < 2:
        raise ScheduleError(f"fbd: pipeline_parallel_size must be at least 2 (got {num_devices}).")
    columns = 1 + backward_per_forward
    forward, *pipes = (tuple(range(column, num_devices * columns, columns)) for column in range(columns))
    return Placement(
        tuple(pipes), ForwardPipe(forward, merge_forward_tensor_parallel, float(forward_slowdown))
    )


@schedule("fbd", place=disaggregated, options=_OPTIONS)
def fbd(
    device: int,
    num_devices: int,
    micro_batches: int,
    backward_per_forward: int,
    backward: str,
    **placement_options: object,
) -> Iterator[Op]:
    """Forwards and backwards on separate devices; backward devices repeat the forwards."""
    pipes = backward_per_forward
    per_pipe, remainder = divmod(micro_batches, pipes)
    if remainder or not per_pipe:
        valid = " or ".join(str(n) for n in (per_pipe * pipes, (per_pipe + 1) * pipes) if n)
        raise ScheduleError(
            f"fbd: micro_batches must be a multiple of backward_per_forward, {pipes} (got {micro_batches}). "
            f"Use {valid}."
        )
    stage, column = divmod(device, 1 + pipes)
    stages = num_devices // (1 + pipes)
    if column > 0:
        kinds = (RECOMPUTE, BACKWARD) if backward == _WHOLE else (RECOMPUTE, BACKWARD_INPUT, BACKWARD_WEIGHT)
        pipe = column - 1
        for m in range(pipe * per_pipe, (pipe + 1) * per_pipe):
            yield from (Op(kind, m, stage) for kind in kinds)
    elif stage < stages - 1:
        # The micro-batches of the pipes alternate.
        for m in range(per_pipe):
            yield from (Op(FORWARD, pipe * per_pipe + m, stage) for pipe in range(pipes))


def most_ahead(stages: int, stage: int, spare: int = 1) -> int:
    """Return the maximum number of outputs of ``stage`` that the next stage's backward device has not yet received.

    With equal stages, a bound of ``stages - 1 - stage`` does not lengthen the step. In forward times, the backward
    device of the next stage ends its m-th repeated forward at 3m + 2(stages - 2 - stage) + stages. The last stage does
    not wait if the m-th forward of ``stage`` starts at 3m + stage. ``spare`` more outputs hide the time of messages.
    """
    return stages - 1 - stage + spare
