#!/usr/bin/env bash
# DeepSpeed 0.19.8: with "bf16" and ZeRO, gradients of micro-batches are summed in bf16, in plain models and in pipelines. A
# sum of equal gradients stops growing at 256 of them: of 1,024, a quarter remains. No error, no warning.
#
# bf16 has 8 significant bits, so 256 + 1 is 256. The dtype of the sum defaults to that of the model. With the JSON key
# data_types.grad_accum_dtype "fp32" the gradient is right.
#
# Output seen (changes of a weight by SGD with a learning rate of 1; its gradient is 1 in each of 1,024 micro-batches):
#   default: pipeline 0.25, ZeRO stage 1 0.25, ZeRO stage 2 0.25, ZeRO stage 3 0.25
#   fp32: pipeline 1.0, ZeRO stage 1 1.0, ZeRO stage 2 1.0, ZeRO stage 3 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy setuptools wheel
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install -qq --no-build-isolation deepspeed==0.19.8
cat > "$folder/run.py" <<'PYTHON'
from itertools import repeat

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

MICRO_BATCHES = 1024
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an op of CPUs that takes a minute to compile
deepspeed.init_distributed("gloo")


def change(pipeline, zero_stage, data_types):
    """Return by how much a step changes a weight whose gradient is 1 in all micro-batches."""
    model = layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    if pipeline:
        model = PipelineModule([layer], num_stages=1, loss_fn=lambda output, _: output.mean())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "data_types": data_types,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    sample = torch.ones(1, 1, dtype=torch.bfloat16)
    if pipeline:
        engine.train_batch(repeat((sample, sample)))
    else:
        for _ in range(MICRO_BATCHES):
            engine.backward(engine(sample).mean())
            engine.step()
    with deepspeed.zero.GatheredParameters([layer.weight], enabled=zero_stage == 3):
        return -layer.weight.item()


seen = []
for label, data_types in (("default", {}), ("fp32", {"grad_accum_dtype": "fp32"})):
    changes = {"pipeline": change(True, 1, data_types)}
    changes.update({f"ZeRO stage {stage}": change(False, stage, data_types) for stage in (1, 2, 3)})
    print(f"{label}: {', '.join(f'{engine} {value}' for engine, value in changes.items())}")
    seen.append(set(changes.values()))
assert seen == [{0.25}, {1.0}], seen
torch.distributed.destroy_process_group()
PYTHON
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$folder/venv/bin/torchrun" --standalone "$folder/run.py" 2> "$folder/log" | grep -v "^\[" || (cat "$folder/log"; false)
