#!/usr/bin/env bash
# DeepSpeed 0.19.8: with WarmupCosineLR the first step has the learning rate 0, whatever "warmup_min_ratio" is, so it changes
# no weight; the second step has the ratio. WarmupLR and WarmupDecayLR begin with "warmup_min_lr". All three log
# the same warning, about a learning rate that is read before the scheduler has started.
#
# Output seen (rates of the first three steps; the minimum is 0.1 of 1e-3):
#   WarmupCosineLR 0 0.0001 0.00055
#   WarmupLR 0.0001 0.0001 0.00055
#   WarmupDecayLR 0.0001 0.0001 0.00055
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy setuptools wheel
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install -qq --no-build-isolation deepspeed==0.19.8
cat > "$folder/run.py" <<'PYTHON'
import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR

RATIOS = {"total_num_steps": 10, "warmup_min_ratio": 0.1}
RATES = {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3}
SEEN = {
    "WarmupCosineLR": "0 0.0001 0.00055",
    "WarmupLR": "0.0001 0.0001 0.00055",
    "WarmupDecayLR": "0.0001 0.0001 0.00055",
}
for scheduler_class, arguments in (
    (WarmupCosineLR, RATIOS),
    (WarmupLR, RATES),
    (WarmupDecayLR, {**RATES, "total_num_steps": 10}),
):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    scheduler = scheduler_class(optimizer, warmup_num_steps=4, **arguments)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    text = " ".join(f"{rate:.6g}" for rate in rates)
    print(scheduler_class.__name__, text)
    if text != SEEN[scheduler_class.__name__]:
        raise SystemExit(f"expected {SEEN[scheduler_class.__name__]}")
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
