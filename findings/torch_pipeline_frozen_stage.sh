#!/usr/bin/env bash
# torch 2.13.0: a zero-bubble schedule of torch.distributed.pipelining computes no gradients for the stage behind a frozen
# one. The loss is right, there is no error or warning, and that stage is never trained. The schedule 1F1B trains it.
#
# Fine-tuning with a frozen embedding is such a case. Zero-bubble schedules first compute the gradients of a stage's inputs.
# Its weights are then found on the paths to these inputs. Inputs behind a frozen stage need no gradient, so none is found.
#
# Output seen (the norm of each stage's weight gradient, divided by that of one process):
#   ScheduleInterleaved1F1B: {1: 1.0, 2: 1.0, 3: 1.0}
#   ScheduleInterleavedZeroBubble: {1: None, 2: 1.0, 3: 1.0}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy
cat > "$folder/run.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn.functional import cross_entropy

MICRO_BATCHES = 4
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
first, last = rank == 0, rank == ranks - 1


def build_layers():
    torch.manual_seed(0)
    hidden = [nn.Linear(8, 8) for _ in range(2 * ranks - 2)]
    layers = nn.ModuleList([nn.Embedding(16, 8), *hidden, nn.Linear(8, 16)])
    layers[0].requires_grad_(False)
    return layers


torch.manual_seed(0)
tokens, labels = torch.randint(16, (2, 2 * MICRO_BATCHES))
whole = build_layers()
expected_loss = cross_entropy(nn.Sequential(*whole)(tokens), labels)
expected_loss.backward()

seen = {}
for schedule_class in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
    layers = build_layers()
    stages = [PipelineStage(layers[i], i, 2 * ranks, torch.device("cpu")) for i in (rank, rank + ranks)]
    schedule = schedule_class(stages, MICRO_BATCHES, loss_fn=cross_entropy)
    losses = []
    schedule.step(*([tokens] if first else []), target=labels if last else None, losses=losses)
    if last:
        torch.testing.assert_close(sum(losses) / MICRO_BATCHES, expected_loss)
    shares = {}
    for i in (rank, rank + ranks):
        gradient, expected = layers[i].weight.grad, whole[i].weight.grad
        if expected is not None:
            shares[i] = None if gradient is None else round(float(gradient.norm() / expected.norm()), 3)
    all_shares = [None] * ranks
    dist.all_gather_object(all_shares, shares)
    name = schedule_class.__name__
    seen[name] = dict(sorted(item for part in all_shares for item in part.items()))
    if first:
        print(f"{name}: {seen[name]}")
assert list(seen.values()) == [{1: 1.0, 2: 1.0, 3: 1.0}, {1: None, 2: 1.0, 3: 1.0}], seen
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/run.py"
