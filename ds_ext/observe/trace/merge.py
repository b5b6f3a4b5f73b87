"""The traces of all ranks as one Chrome trace, on rank 0's clock, with an arrow for every message."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from .read import Event, RankTrace, Traces

# A message as both ends know it: step, sender, receiver, what it holds, receiving stage, micro-batch.
Message = tuple[int, int, int, str, int, int]
_Known = TypeVar("_Known")


class Ends(Generic[_Known]):
    """What is known of one end of messages, until the other end is met.

    A step that is run again, from a checkpoint, has its messages again: they are paired in their order.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[Message, str], deque[_Known]] = {}

    def __len__(self) -> int:
        """Ends whose other end was not met."""
        return sum(map(len, self._waiting.values()))

    def meet(self, message: Message, thread: str, known: _Known) -> _Known | None:
        """What is known of the other end; None if that is still to come, and ``known`` is kept for it."""
        other = message, "recv" if thread == "send" else "send"
        waiting = self._waiting.get(other)
        if waiting is None:
            self._waiting.setdefault((message, thread), deque()).append(known)
            return None
        met = waiting.popleft()
        if not waiting:
            del self._waiting[other]
        return met


@dataclass
class Merged:
    """What was joined.

    Attributes:
        messages: that have an arrow.
        events: written, arrows not counted.
        early_us: by how much a message seems to arrive before it is sent, at most: what the clocks are wrong by at
            least. 0: none does.
    """

    messages: int = 0
    events: int = 0
    early_us: float = 0.0
    ends: Ends[Event] = field(default_factory=lambda: Ends[Event]())


def merge(traces: Traces, output: Path) -> Merged:
    """Write one file for Perfetto or chrome://tracing, in the object form of the Trace Event Format."""
    merged = Merged()
    with open(output, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        file.write(json.dumps({**_about(traces), "clocks": clocks(traces), "notes": list(traces.notes)}))
        file.write(', "traceEvents": [')
        separator = "\n"
        for trace in traces.ranks.values():
            for event in _joined(trace, merged):
                file.write(f"{separator}{json.dumps(event)}")
                separator = ",\n"
        file.write("\n]}\n")
    return merged


def clocks(traces: Traces) -> list[dict[str, float]]:
    """Per rank: what rank 0's clock was ahead at the first comparison, the drift in parts per million, the error."""
    return [
        {
            "rank": trace.rank,
            "offset_us": round(1e6 * trace.align.comparisons[0].offset_s, 3)
            if trace.align.comparisons
            else 0.0,
            "drift_ppm": round(1e6 * trace.align.drift, 4),
            "error_us": round(1e6 * trace.align.error_s, 3),
        }
        for trace in traces.ranks.values()
    ]


def messages_of(event: Event) -> list[Message]:
    """Which messages a span of "send" or "recv" is about: one, or one to each of several ranks; none of other spans.

    A span's stage is the sender's on a send and the receiver's on a receive; activations go up by one, gradients down.
    """
    thread, values = event.get("tid"), event.get("args", {})
    if thread not in ("send", "recv") or "peer" not in values:
        return []
    kind, stage, rank, step = event["cat"], values["stage"], event["pid"], values["step"]
    if thread == "recv":
        return [(step, values["peer"], rank, kind, stage, values["micro_batch"])]
    stage += 1 if kind == "activation" else -1
    peers = [values["peer"], *values.get("more_peers", ())]
    return [(step, rank, peer, kind, stage, values["micro_batch"]) for peer in peers]


def in_order(one: Event, other: Event) -> tuple[Event, Event]:
    """(send, receive) of the two ends of a message."""
    return (one, other) if one["tid"] == "send" else (other, one)


def _about(traces: Traces) -> dict[str, Any]:
    ours = ("rank", "device", "data_parallel_rank", "tensor_parallel_rank", "pid", "host")
    return {key: value for key, value in traces.run.items() if key not in ours}


def _joined(trace: RankTrace, merged: Merged) -> Iterator[Event]:
    """The events of a rank, and the arrows of the messages whose other end was there before."""
    for raw in trace.events():
        if not raw:
            continue
        event = trace.aligned(raw)
        merged.events += event.get("ph") != "M"
        yield event
        for message in messages_of(event):
            other = merged.ends.meet(message, event["tid"], event)
            if other is not None:
                yield from _arrow(*in_order(event, other), merged)


def _arrow(sent: Event, received: Event, merged: Merged) -> Iterator[Event]:
    """From inside the send to inside the end of the receive: a flow belongs to the span that its time falls into."""
    merged.messages += 1
    arrived_us = received["ts"] + received["dur"]
    merged.early_us = max(merged.early_us, sent["ts"] - arrived_us)
    values = received["args"]
    flow = {"name": f"{values['micro_batch']}@{values['stage']}", "cat": "message", "id": merged.messages}
    inside = min(sent["dur"] / 2, 0.5)
    yield {**flow, "ph": "s", "pid": sent["pid"], "tid": sent["tid"], "ts": round(sent["ts"] + inside, 3)}
    inside = min(received["dur"] / 2, 0.5)
    end = {"ph": "f", "bp": "e", "pid": received["pid"], "tid": received["tid"]}
    yield {**flow, **end, "ts": round(arrived_us - inside, 3)}
