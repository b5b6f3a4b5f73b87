"""FBD: forwards and backwards on devices of their own (MegaFBD, "forward-backward disaggregation"). ::

    rank 0  0  1  2  3  .  .  .  .  .  .  .  .  .  .  .
    rank 1  0* .  .  .  0'--- 1* 1'--- 2* 2'--- 3* 3'---
    rank 2  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .
    rank 3  .  0* 0'--- 1* 1'--- 2* 2'--- 3* 3'--- .  .

A forward device computes without a graph and hands its output to the next forward device and to the backward device
of the next stage. That one computes the stage again, with its graph (``0*``), and goes backward as soon as the gradient
is there, so it never keeps more than one micro-batch. The forward of the last stage is computed by nobody: only its
backward device needs the output. With ``k`` = ``backward_per_forward`` the forward devices serve ``k`` pipelines of
backward devices, which are replicas of each other.

Stage s is on the devices (1 + k)s, its forward, and (1 + k)s + 1 ... (1 + k)s + k, its backwards. A step takes
(P - 1)f + N/k (f + b + w) + (P - 1)(b + w), on 1 + k times as many devices as a plain pipeline of P stages. A forward
device works f for (f + b + w) that each of its k backward devices works. So FBD pays where forward devices are weaker
(up to (f + b + w)/(kf) times as slow, for nothing), where one rank of theirs does what TP ranks do, or where the memory
of activations is the limit; on equal devices with memory to spare they are faster as plain pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import ScheduleError
from ..ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op
from ..placement import ForwardPipe, Placement
from ..registry import Option, schedule

_WHOLE, _SPLIT = "whole", "split"
_OPTIONS = {
    "backward_per_forward": Option(1, 1, "backward pipelines that one forward pipeline serves"),
    "merge_forward_tensor_parallel": Option(
        1, 1, "tensor-parallel ranks whose work one forward rank does; 1: none are merged"
    ),
    "forward_slowdown": Option(1.0, 0, "time of the same work on a forward device and on a backward device"),
    "backward": Option(_WHOLE, None, "whether backwards are split in two", (_WHOLE, _SPLIT)),
}


def disaggregated(
    num_devices: int, backward_per_forward: int, merge_forward_tensor_parallel: int, forward_slowdown: float
) -> Placement:
    """P stages on P forward devices and k x P backward devices. Raises ScheduleError for less than two stages."""
    if num_devices < 2:
        raise ScheduleError(
            f"fbd needs at least 2 stages (pipeline_parallel_size), as the forward of the last one is only needed "
            f"where its backward is; got {num_devices}. Use 2 or more, or another schedule."
        )
    columns = 1 + backward_per_forward
    forward, *pipes = (tuple(range(column, num_devices * columns, columns)) for column in range(columns))
    merged, slowdown = merge_forward_tensor_parallel, float(forward_slowdown)
    return Placement(tuple(pipes), ForwardPipe(forward, merged, slowdown))


@schedule("fbd", place=disaggregated, options=_OPTIONS)
def fbd(
    device: int,
    num_devices: int,
    micro_batches: int,
    backward_per_forward: int,
    backward: str,
    **of_placement: object,
) -> Iterator[Op]:
    """Forwards on devices of their own, which feed devices that repeat them and go backward."""
    pipes = backward_per_forward
    each, rest = divmod(micro_batches, pipes)
    if rest or not each:
        ways = " or ".join(str(n) for n in (each * pipes, (each + 1) * pipes) if n)
        raise ScheduleError(
            f"fbd shares the micro-batches evenly between {pipes} backward pipelines (backward_per_forward); got "
            f"{micro_batches}. Use {ways}."
        )
    stage, column = divmod(device, 1 + pipes)
    if column == 0:
        if stage < num_devices // (1 + pipes) - 1:
            # Every pipeline gets its next micro-batch in turn.
            yield from (Op(FORWARD, pipe * each + m, stage) for m in range(each) for pipe in range(pipes))
        return
    kinds = (RECOMPUTE, BACKWARD) if backward == _WHOLE else (RECOMPUTE, BACKWARD_INPUT, BACKWARD_WEIGHT)
    for m in range((column - 1) * each, column * each):
        yield from (Op(kind, m, stage) for kind in kinds)


def most_ahead(stages: int, stage: int, spare: int = 1) -> int:
    """Micro-batches that the forward of ``stage`` may be ahead of what the next stage's backward device has taken.

    A bound of ``stages - 1 - stage`` costs no time when all stages are alike: the backward device of the next stage
    ends its m-th repeated forward at 3m + 2(stages - 2 - stage) + stages, in forward times, and for the last stage not
    to wait the forward of ``stage`` must start its m-th at 3m + stage. ``spare`` more hide the time of messages.
    """
    return stages - 1 - stage + spare
