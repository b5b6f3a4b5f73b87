"""Independent checker of the JSON of ``python -m ds_ext dump``, without code of ds_ext.

Receives are matched with sends by their position on the link, and the program ends if the graph of "must come
before" has no cycle.
"""

from __future__ import annotations

from collections import defaultdict
from graphlib import TopologicalSorter
from typing import Any

HERE = {"op", "micro_batch", "stage", "pipe"}
KEYS = {
    "LoadMicroBatch": HERE,
    "ForwardPass": HERE | {"chunk"},
    "BackwardPass": HERE | {"chunk"},
    "BackwardInput": HERE | {"chunk"},
    "BackwardWeight": HERE | {"chunk"},
    "SendActivation": HERE | {"peer", "other_stage"},
    "RecvActivation": HERE | {"peer", "other_stage"},
    "SendGrad": HERE | {"peer", "other_stage"},
    "RecvGrad": HERE | {"peer", "other_stage"},
    "CopyActivation": HERE | {"other_stage"},
    "CopyGrad": HERE | {"other_stage"},
    "ReduceTiedGrads": {"op"},
    "ReduceGrads": {"op"},
    "OptimizerStep": {"op"},
    "EndOfStep": {"op"},
}
Step = tuple[int, int]  # rank, position
Part = tuple[int, int]  # micro-batch, slice


def part_of(instruction: dict[str, Any]) -> Part:
    return instruction["micro_batch"], instruction.get("slice", 0)


class DumpChecker:
    """Check of the properties of a valid dump."""

    def __init__(self, dump: dict[str, Any]) -> None:
        self.dump = dump
        self.last = dump["model_stages"] - 1
        self.slices = dump.get("slices", 1)
        self.home = {(c["stage"], c["pipe"]): c["rank"] for c in dump["chunks"]}
        self.steps = [((r, i), x) for r, order in enumerate(dump["ranks"]) for i, x in enumerate(order)]

    def check(self, link_credits: int | None = None) -> None:
        """Raise AssertionError for an invalid dump, or graphlib.CycleError for a deadlock."""
        self.check_shape()
        self.check_pipes()
        self.check_computations()
        self.check_peers()
        self.check_data()
        self.check_ends(link_credits)

    def check_shape(self) -> None:
        sizes = ("stages", "devices", "micro_batches", "model_stages", *["slices"] * (self.slices > 1))
        assert tuple(self.dump) == ("version", "schedule", *sizes, "chunks", "ranks")
        assert self.dump["version"] == 2
        assert len(self.dump["ranks"]) == self.dump["stages"] == self.dump["devices"]
        for chunk in self.dump["chunks"]:
            assert list(chunk) == ["rank", "device", "chunk", "stage", "pipe"]
            assert chunk["rank"] == chunk["device"]
        for _, x in self.steps:
            assert set(x) - {"slice"} == KEYS[x["op"]], x
            assert x.get("slice", 1) in range(1, max(self.slices, 2)), x

    def check_pipes(self) -> None:
        chunks, pipes = self.dump["chunks"], {c["pipe"] for c in self.dump["chunks"]}
        assert len(self.home) == len(chunks)
        assert set(self.home) == {(s, p) for s in range(self.last + 1) for p in pipes}
        for rank in range(self.dump["stages"]):
            numbers = [c["chunk"] for c in chunks if c["rank"] == rank]
            assert sorted(numbers) == list(range(len(numbers)))
        carried: dict[int, set[int]] = defaultdict(set)
        for _, x in self.steps:
            if "pipe" in x:
                carried[x["pipe"]].add(x["micro_batch"])
        assert sorted(m for ids in carried.values() for m in ids) == list(range(self.dump["micro_batches"]))

    def check_computations(self) -> None:
        numbers = {(c["rank"], c["stage"], c["pipe"]): c["chunk"] for c in self.dump["chunks"]}
        seen = []
        for (rank, _), x in self.steps:
            if "chunk" in x:
                assert numbers[rank, x["stage"], x["pipe"]] == x["chunk"]
                seen.append((x["op"], x["stage"], part_of(x)))
        stages = range(self.last + 1)
        parts = [(m, j) for m in range(self.dump["micro_batches"]) for j in range(self.slices)]
        kinds = {kind for kind, _, _ in seen}
        backwards = ({"BackwardPass"}, {"BackwardInput", "BackwardWeight"}, set[str]())
        assert "ForwardPass" in kinds and kinds - {"ForwardPass"} in backwards
        assert sorted(seen) == sorted((k, s, part) for k in kinds for s in stages for part in parts)

    def check_peers(self) -> None:
        for (rank, _), x in self.steps:
            step = {"SendActivation": 1, "RecvGrad": 1, "CopyActivation": 1}.get(x["op"])
            step = {"SendGrad": -1, "RecvActivation": -1, "CopyGrad": -1}.get(x["op"], step)
            if step is not None:
                assert self.home[x["stage"], x["pipe"]] == rank
                assert x["other_stage"] == x["stage"] + step, x
                other = self.home[x["other_stage"], x["pipe"]]
                assert other == x.get("peer", rank), x
                assert (other == rank) == x["op"].startswith("Copy")

    def check_data(self) -> None:
        """Check that inputs precede the computation, and results precede their sends and copies."""
        for order in self.dump["ranks"]:
            there: set[tuple[str, int, Part]] = set()
            for x in order:
                if "stage" not in x:
                    continue
                op, s, m = x["op"], x["stage"], part_of(x)
                earlier, later = (m[0], m[1] - 1), (m[0], m[1] + 1)
                needs: list[tuple[str, int, Part]] = []
                if op == "ForwardPass":
                    needs = [("Load", s, m)] * (s in (0, self.last)) + [("x", s, m)] * (s > 0)
                    needs += [("y", s, earlier)] * (m[1] > 0)
                elif op in ("BackwardPass", "BackwardInput"):
                    needs = [("y", s, m)] + [("dy", s, m)] * (s < self.last)
                    needs += [("dx", s, later)] * (m[1] < self.slices - 1)
                elif op in ("SendActivation", "CopyActivation"):
                    needs = [("y", s, m)]
                elif op in ("SendGrad", "CopyGrad", "BackwardWeight"):
                    needs = [("dx", s, m)]
                assert there.issuperset(needs), (x, set(needs) - there)
                makes = {
                    "LoadMicroBatch": ("Load", s, m),
                    "RecvActivation": ("x", s, m),
                    "CopyActivation": ("x", s + 1, m),
                    "ForwardPass": ("y", s, m),
                    "RecvGrad": ("dy", s, m),
                    "CopyGrad": ("dy", s - 1, m),
                    "BackwardPass": ("dx", s, m),
                    "BackwardInput": ("dx", s, m),
                    "BackwardWeight": ("dw", s, m),
                }.get(op)
                assert makes not in there
                there |= {makes} if makes else set()

    def check_ends(self, link_credits: int | None) -> None:
        sends: dict[Step, list[tuple[Step, tuple[str, int, Part]]]] = defaultdict(list)
        receives: dict[Step, list[tuple[Step, tuple[str, int, Part]]]] = defaultdict(list)
        before: dict[Step, set[Step]] = defaultdict(set)
        for (rank, i), x in self.steps:
            before[rank, i] = {(rank, i - 1)} if i else set()
            if x["op"].startswith("Send"):
                forward = x["op"] == "SendActivation"
                item = ("x" if forward else "dy", x["stage"] + (1 if forward else -1), part_of(x))
                sends[rank, x["peer"]].append(((rank, i), item))
            elif x["op"].startswith("Recv"):
                what = "x" if x["op"] == "RecvActivation" else "dy"
                receives[x["peer"], rank].append(((rank, i), (what, x["stage"], part_of(x))))
        assert set(sends) == set(receives)
        for link, sent in sends.items():
            taken = receives[link]
            assert [item for _, item in sent] == [item for _, item in taken], link
            for k, (step, _) in enumerate(taken):
                before[step].add(sent[k][0])
                if link_credits is not None and k + link_credits < len(sent):
                    before[sent[k + link_credits][0]].add(step)
        TopologicalSorter(before).prepare()
