#!/usr/bin/env bash
# torch 2.13.0: a weight that two stages of one rank share gets too small a gradient in torch.distributed.pipelining. A part
# of it is divided twice by the number of micro-batches. No error, no warning.
#
# V schedules put the first and the last stage on one rank, so that an embedding and an output projection can be the same
# Parameter. Each stage divides the gradients of its parameters in place after its own last backward (scale_grads=True, the
# default). With scale_grads=False and one division by the caller, the gradient is that of one process.
#
# Output seen (norms of the shared weight's gradient, divided by that of one process):
#   4 micro-batches: 0.421 with scale_grads, 1.0 without
#   8 micro-batches: 0.299 with scale_grads, 1.0 without
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy
cat > "$folder/run.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def build_layers():
    torch.manual_seed(0)
    embedding, output = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    output.weight = embedding.weight
    return [embedding, *(nn.Linear(8, 8) for _ in range(2 * ranks - 2)), output]


torch.manual_seed(0)
tokens, labels = torch.randint(16, (2, 16))
whole = build_layers()
cross_entropy(nn.Sequential(*whole)(tokens), labels).backward()


def gradient_of_pipeline(micro_batches, scale_grads):
    layers = build_layers()
    numbers = (rank, 2 * ranks - 1 - rank)
    stages = [PipelineStage(layers[i], i, 2 * ranks, torch.device("cpu")) for i in numbers]
    schedule = ScheduleZBVZeroBubble(stages, micro_batches, loss_fn=cross_entropy, scale_grads=scale_grads)
    schedule.step(*([tokens] if rank == 0 else []), target=labels if rank == 0 else None)
    return layers[rank].weight.grad


expected = whole[rank].weight.grad
seen = []
for micro_batches in (4, 8):
    scaled = gradient_of_pipeline(micro_batches, True)
    summed = gradient_of_pipeline(micro_batches, False) / micro_batches
    if rank == 0:
        torch.testing.assert_close(summed, expected)
        shares = [round(float(gradient.norm() / expected.norm()), 3) for gradient in (scaled, summed)]
        print(f"{micro_batches} micro-batches: {shares[0]} with scale_grads, {shares[1]} without")
        seen.append(shares)
if rank == 0:
    assert seen == [[0.421, 1.0], [0.299, 1.0]], seen
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/run.py"
