"""Training in the guest: the engine's messages over shared memory, tcp and rdma give the same losses and weights.

One process imports torch and DeepSpeed, which takes the emulator a minute or more, and forks the ranks of every job.
Prints a line of run_scenarios.py's format.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

RANKS, STEPS, WIDTH, LAYERS = 2, 3, 64, 8
TRANSPORTS = ("shm", "tcp", "rdma")
SCHEDULE = "bitpipe_zb"
HERE = "10.8.0.1"
FIRST_PORT = 29_500
LIMIT_S = 120


def main() -> int:
    """Run one job per transport and compare them."""
    began = time.monotonic()
    print(flush=True)  # the firmware leaves the console in the middle of a line
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 - imports torch's compiler, as initialize() does
    import torch

    import ds_ext.engine  # noqa: F401 - before the forks

    print(f"imported in {time.monotonic() - began:.1f} s", flush=True)
    torch.set_num_threads(1)
    word = "passed"
    with tempfile.TemporaryDirectory() as name:
        for number, transport in enumerate(TRANSPORTS):
            children = [_start(rank, transport, FIRST_PORT + number, Path(name)) for rank in range(RANKS)]
            ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            if any(ends):
                word = f"FAILED {transport} {ends}"
        if word == "passed":
            results = [
                [torch.load(Path(name) / f"{transport}{rank}.pt") for rank in range(RANKS)]
                for transport in TRANSPORTS
            ]
            word = (
                "passed" if all(_equal(results[0], other) for other in results[1:]) else "FAILED: different"
            )
    print(f"SCENARIO trained {word} {time.monotonic() - began:.1f} s", flush=True)
    return word != "passed"


def _start(rank: int, transport: str, port: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    signal.alarm(LIMIT_S)
    status = 1
    try:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": HERE,
            "MASTER_PORT": str(port),
        }
        _train(rank, transport, folder)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _train(rank: int, transport: str, folder: Path) -> None:
    """Train, and write the losses, the weights and the names of the links."""
    import torch
    from torch import nn

    import ds_ext

    config: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "ds_ext": {"schedule": SCHEDULE, "pipeline_parallel_size": RANKS, "transport": transport},
    }
    torch.manual_seed(1)
    data = torch.randn(STEPS, 2 * RANKS, 2, 2, WIDTH)
    ds_ext.engine.init_distributed(60)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.MSELoss(), partition_method="uniform")
    engine, *_ = ds_ext.initialize(model=model, config=config)
    assert transport in engine.transport.name, engine.transport.name
    mine = data.view(STEPS, 2, RANKS, 2, 2, WIDTH)
    losses = []
    for step in range(STEPS):
        share = mine[step, rank]
        losses.append(float(engine.train_batch(iter([(x, y) for x, y in share.unbind(0)]))))
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    torch.save((losses, weights), folder / f"{transport}{rank}.pt")
    engine.transport.close()
    torch.distributed.barrier()


def _equal(ours: list[Any], theirs: list[Any]) -> bool:
    import torch

    return all(
        losses == other_losses
        and weights.keys() == other_weights.keys()
        and all(torch.equal(value, other_weights[name]) for name, value in weights.items())
        for (losses, weights), (other_losses, other_weights) in zip(ours, theirs, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
