#!/usr/bin/env bash
# torch 2.13.0: a pipeline of torch.distributed.pipelining evaluates a smaller last batch without an error, but returns
# too many rows. The rows in excess are outputs of the batch before, and the rows behind them are shifted.
#
# Ten samples in four micro-batches are 3, 3, 2 and 2 rows. Stages receive them into the buffers of the first batch, which
# had 3 rows each. A message of 2 rows leaves the third row as it was, and the stage computes all three.
#
# Output seen:
#   batch of 12: 12 rows, samples [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
#   batch of 10: 12 rows, samples [12, 13, 14, 15, 16, 17, 18, 19, 8, 20, 21, 11]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy
cat > "$folder/run.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
stage = PipelineStage(nn.Identity(), rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4)
samples = torch.arange(22.0).unsqueeze(1)

seen = []
for batch in (samples[:12], samples[12:]):
    outputs = schedule.eval(batch) if rank == 0 else schedule.eval()
    if rank == 1:
        numbers = [int(number) for number in outputs.flatten()]
        print(f"batch of {len(batch)}: {len(numbers)} rows, samples {numbers}")
        seen.append(numbers)
if rank == 1:
    assert seen == [list(range(12)), [12, 13, 14, 15, 16, 17, 18, 19, 8, 20, 21, 11]], seen
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/run.py"
