"""Numbers of all channels, in one table, so that no two uses share a channel.

A tag has 15 bits for the channel: 3 for the use and 12 for the stage. The last use has channels without a stage.
"""

from __future__ import annotations

MAX_STAGES = 1 << 12

# Uses with one channel per stage.
MESSAGE_KINDS = 4  # 0 to 3: messages between stages by the number of their kind, and by the receiving stage
FBD_CREDITS = 4  # from a backward device that has received an activation of a stage
FBD_WEIGHT_HEADERS, FBD_WEIGHT_PIECES = 5, 6
_WITHOUT_STAGE = 7


def stage_channel(use: int, stage: int) -> int:
    return use * MAX_STAGES + stage


DYNAMIC_CHOICES = stage_channel(
    _WITHOUT_STAGE, 0
)  # ops that the first rank of a tensor-parallel group has chosen
DYNAMIC_MESSAGES = stage_channel(_WITHOUT_STAGE, 1)  # messages between stages in the order of the sends
GPU_CONTROL = stage_channel(_WITHOUT_STAGE, 2)  # reserved by the transport between GPUs
SPLIT_HEADERS = stage_channel(_WITHOUT_STAGE, 3)  # headers of the transport "torch" between GPUs
