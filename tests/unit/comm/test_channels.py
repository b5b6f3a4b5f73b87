"""The table of channels: every number belongs to one use, and fits a tag."""

from __future__ import annotations

from ds_ext.comm import channels
from ds_ext.comm.channels import MAX_STAGES, stage_channel
from ds_ext.comm.transport import describe_tag, make_tag
from ds_ext.pipe_schedules.ops import MessageKind


def test_no_two_uses_share_a_channel() -> None:
    numbers = {
        name: value
        for name, value in vars(channels).items()
        if name.isupper() and name.lstrip("_") not in ("MAX_STAGES", "WITHOUT_STAGE", "MESSAGE_KINDS")
    }
    numbers |= {f"message {kind}": kind for kind in range(channels.MESSAGE_KINDS)}
    stageless = {name: value for name, value in numbers.items() if value >= MAX_STAGES}
    uses = {name: value for name, value in numbers.items() if value < MAX_STAGES}
    assert len(stageless) == 4 and len(uses) == 7
    taken = [*stageless.values()]
    for use in uses.values():
        taken += [stage_channel(use, stage) for stage in (0, 1, MAX_STAGES - 1)]
    assert len(set(taken)) == len(taken) and set(MessageKind) <= {*range(channels.MESSAGE_KINDS)}
    tags = {make_tag(channel, 3) for channel in taken}
    assert len(tags) == len(taken) and max(tags) < 2**31
    assert describe_tag(make_tag(stage_channel(MessageKind.GRADIENT, 5), 3)).endswith(
        f"(channel {MAX_STAGES + 5}, item 3)"
    )
