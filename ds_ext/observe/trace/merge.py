"""Merge all ranks' traces into one Chrome trace on rank 0's clock, with an arrow for every message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .read import Event, RankTrace, Traces

# (step, sender, receiver, "activation" or "gradient", receiving stage, micro-batch)
Message = tuple[int, int, int, str, int, int]
# Values of individual ranks in the description of a run.
_RANK_KEYS = ("rank", "device", "data_parallel_rank", "tensor_parallel_rank", "pid", "host")


class UnpairedEnds:
    """Sends and receives whose other end has not been read yet.

    A step that runs again from a checkpoint repeats its messages. They are paired in order.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[Message, str], list[Event]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def pairs(self, event: Event) -> Iterator[tuple[Message, Event, Event]]:
        """Yield (message, send, receive) if the other end was read before; else wait for it.

        A "send" may belong to several messages, spans of other threads belong to none.
        """
        for message in list_messages(event):
            sends = event["tid"] == "send"
            key = (message, "recv" if sends else "send")
            if key not in self._waiting:
                self._waiting.setdefault((message, event["tid"]), []).append(event)
                continue
            other_end = self._waiting[key].pop(0)
            if not self._waiting[key]:
                del self._waiting[key]
            yield (message, event, other_end) if sends else (message, other_end, event)


@dataclass
class Merged:
    """Counts of a merge, complete when all events are written.

    Attributes:
        messages: number of messages with an arrow.
        events: number of events written, without arrows.
        early_us: largest time by which a message seems to arrive before its send, a lower bound on the clock error in
            microseconds; 0 if no message does.
        unpaired: messages of which only one end was read.
    """

    messages: int = 0
    events: int = 0
    early_us: float = 0.0
    unpaired: UnpairedEnds = field(default_factory=UnpairedEnds)


def merge(traces: Traces, output: Path) -> Merged:
    """Write one trace for Perfetto or chrome://tracing, in the object form of the Trace Event Format.

    Returns the counts of the written events and messages.
    """
    merged = Merged()
    run = {key: value for key, value in traces.run.items() if key not in _RANK_KEYS}
    with open(output, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        file.write(json.dumps({**run, "clocks": clocks(traces), "notes": list(traces.notes)}))
        file.write(', "traceEvents": [')
        separator = "\n"
        for trace in traces.ranks.values():
            for event in _events(trace, merged):  # adds to the counts
                file.write(f"{separator}{json.dumps(event)}")
                separator = ",\n"
        file.write("\n]}\n")
    return merged


def clocks(traces: Traces) -> list[dict[str, float]]:
    """Return the first clock offset (us), the drift (parts per million) and the error (us) of every rank."""
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


def list_messages(event: Event) -> list[Message]:
    """Return the messages of a "send" or "recv" span, several if it sends to several ranks; none for other spans.

    The span of a send contains the sender's stage, that of a receive the receiver's.
    """
    thread, values = event.get("tid"), event.get("args", {})
    if thread not in ("send", "recv") or "peer" not in values:
        return []
    kind, rank = event["cat"], event["pid"]
    step, micro_batch = values["step"], values["micro_batch"]
    if thread == "recv":
        return [(step, values["peer"], rank, kind, values["stage"], micro_batch)]
    # Traces of earlier versions have no stage at the other end of a message between neighbors.
    receiving_stage = values.get("other_stage", values["stage"] + (1 if kind == "activation" else -1))
    peers = [values["peer"], *values.get("more_peers", ())]
    return [(step, rank, peer, kind, receiving_stage, micro_batch) for peer in peers]


def _events(trace: RankTrace, merged: Merged) -> Iterator[Event]:
    """Yield the events of a rank and arrows of messages whose other end was read before. Count both in ``merged``."""
    for raw in trace.events():
        if not raw:  # end of the file
            continue
        event = trace.aligned(raw)
        merged.events += event.get("ph") != "M"
        yield event
        for _, send, receive in merged.unpaired.pairs(event):
            yield from _arrow(send, receive, merged)


def _arrow(send: Event, receive: Event, merged: Merged) -> Iterator[Event]:
    """Yield the two events of an arrow from a send to its receive, and count the message in ``merged``.

    A viewer attaches each end to the span that contains its time. So it is up to 0.5 us inside the span.
    """
    merged.messages += 1
    arrival_us = receive["ts"] + receive["dur"]
    merged.early_us = max(merged.early_us, send["ts"] - arrival_us)
    values = receive["args"]
    flow = {"name": f"{values['micro_batch']}@{values['stage']}", "cat": "message", "id": merged.messages}
    start_us = send["ts"] + min(send["dur"] / 2, 0.5)
    yield {**flow, "ph": "s", "pid": send["pid"], "tid": send["tid"], "ts": round(start_us, 3)}
    end_us = arrival_us - min(receive["dur"] / 2, 0.5)
    end = {"ph": "f", "bp": "e", "pid": receive["pid"], "tid": receive["tid"]}
    yield {**flow, **end, "ts": round(end_us, 3)}
