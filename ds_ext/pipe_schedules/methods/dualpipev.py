"""DualPipeV: one V-shaped pipe whose forwards and backwards run in pairs (arXiv 2412.19437, 3.2.1, cut in half). ::

    rank 0  0  1  2  0  0' 0" 1  3  1'--- 2  0'--- 4  2'--- 3  1'--- 3'--- 4  .  2'--- 4'--- 3' 3" 4' 4"
    rank 1  .  0  0  1  1  2  0'--- 2  0'--- 3  1'--- 3  1'--- 4  2'--- 4  2'--- 3'--- 3'--- 4' 4' 4" 4"

DeepSeek's DualPipe repository describes it. Micro-batches go to the last rank and back, so the loss is on rank 0.
On GPUs the two computations of a pair (steps 4 and 5) share a device and hide each other's messages; here they come
one after the other. Weight gradients are apart only where nothing else could be computed. It needs at least 2D
micro-batches.
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
    """A V-shaped pipe of paired forwards and backwards, D + 1/2 activations; here to compare with."""
    if micro_batches < 2 * num_devices:
        raise ScheduleError(
            f"dualpipev needs at least {2 * num_devices} micro-batches (2D, to fill both ways); got {micro_batches}."
        )
    there, back = device, 2 * num_devices - 1 - device
    forwards = {there: count(), back: count()}
    backwards = {there: count(), back: count()}
    weights: deque[Op] = deque()

    def forward(stage: int) -> Op:
        return Op(FORWARD, next(forwards[stage]), stage)

    def backward(stage: int) -> Op:
        return Op(BACKWARD, next(backwards[stage]), stage)

    def backward_input(stage: int) -> Op:
        op = Op(BACKWARD_INPUT, next(backwards[stage]), stage)
        weights.append(op._replace(kind=BACKWARD_WEIGHT))
        return op

    # Step 1: forwards on the way there.
    for _ in range(2 * (num_devices - 1 - device)):
        yield forward(there)
    # Step 2: forwards both ways.
    for _ in range(device + 1):
        yield forward(there)
        yield forward(back)
    # Step 3: the first backwards, in halves, and forwards on the way back.
    for _ in range(num_devices - 1 - device):
        yield backward_input(back)
        yield weights.popleft()
        yield forward(back)
    # Step 4: the main part, pairs of forward and backward.
    for _ in range(micro_batches - 2 * num_devices + device + 1):
        yield forward(there)
        yield backward(back)
        yield forward(back)
        yield backward(there)
    # Step 5: no more forwards on the way there.
    for _ in range(num_devices - 1 - device):
        yield backward(back)
        yield forward(back)
        yield backward(there)
    # Step 6: backwards both ways; from the middle on, only what the other ranks wait for.
    for turn in range(2 * (device + 1)):
        stage = there if turn % 2 else back
        yield backward(stage) if turn < device + 1 else backward_input(stage)
    # Step 7: weight gradients against the last backwards.
    for _ in range(num_devices - 1 - device):
        yield weights.popleft()
        yield backward_input(there)
    # Step 8: the weight gradients that are left.
    yield from weights
