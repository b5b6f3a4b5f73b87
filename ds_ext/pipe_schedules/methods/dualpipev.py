"""DualPipeV: one V-shaped pipe whose forwards and backwards run in pairs (arXiv 2412.19437, 3.2.1, cut in half). ::

    device 0  0  1  2  0  0' 0" 1  3  1'--- 2  0'--- 4  2'--- 3  1'--- 3'--- 4  .  2'--- 4'--- 3' 3" 4' 4"
    device 1  .  0  0  1  1  2  0'--- 2  0'--- 3  1'--- 3  1'--- 4  2'--- 4  2'--- 3'--- 3'--- 4' 4' 4" 4"

The steps follow DeepSeek's DualPipe repository. The pipe turns at the last device, so the loss is on device 0. On
GPUs the two ops of a pair (steps 4 and 5) overlap to hide messages; here they run one after the other. Backwards are
split only where a device would otherwise be idle. N must be at least 2D.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from ...errors import ScheduleError
from ..ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Op
from ..placement import v
from ..registry import schedule


@schedule("dualpipev", place=v)
def dualpipev(device: int, num_devices: int, micro_batches: int) -> Iterator[Op]:
    """A V-shaped pipe of paired forwards and backwards: D + 1/2 activations; for comparison."""
    if micro_batches < 2 * num_devices:
        raise ScheduleError(
            f"dualpipev: micro_batches must be at least 2D = {2 * num_devices} (got {micro_batches})."
        )
    first, second = device, 2 * num_devices - 1 - device  # the two stages of the device
    forwards = {first: count(), second: count()}
    backwards = {first: count(), second: count()}
    weights: deque[Op] = deque()

    def forward(stage: int) -> Op:
        return Op(FORWARD, next(forwards[stage]), stage)

    def backward(stage: int) -> Op:
        return Op(BACKWARD, next(backwards[stage]), stage)

    def backward_input(stage: int) -> Op:
        op = Op(BACKWARD_INPUT, next(backwards[stage]), stage)
        weights.append(op._replace(kind=BACKWARD_WEIGHT))
        return op

    # Step 1, nF0: forwards of the first stage.
    for _ in range(2 * (num_devices - 1 - device)):
        yield forward(first)
    # Step 2, nF0F1: forwards of both stages.
    for _ in range(device + 1):
        yield forward(first)
        yield forward(second)
    # Step 3, nI1W1F1: split backwards and forwards of the second stage.
    for _ in range(num_devices - 1 - device):
        yield backward_input(second)
        yield weights.popleft()
        yield forward(second)
    # Step 4, nF0B1F1B0: steady state, pairs of a forward and a backward.
    for _ in range(micro_batches - 2 * num_devices + device + 1):
        yield forward(first)
        yield backward(second)
        yield forward(second)
        yield backward(first)
    # Step 5, nB1F1B0: the first stage has no more forwards.
    for _ in range(num_devices - 1 - device):
        yield backward(second)
        yield forward(second)
        yield backward(first)
    # Step 6, nB1B0: backwards of both stages, split in the second half.
    for turn in range(2 * (device + 1)):
        stage = first if turn % 2 else second
        yield backward(stage) if turn < device + 1 else backward_input(stage)
    # Step 7, nWB0: weight gradients alternate with the last input gradients.
    for _ in range(num_devices - 1 - device):
        yield weights.popleft()
        yield backward_input(first)
    # Step 8, nW: the remaining weight gradients.
    yield from weights
