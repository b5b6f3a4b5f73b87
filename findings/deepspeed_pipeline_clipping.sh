#!/usr/bin/env bash
# DeepSpeed 0.19.8: without ZeRO, an fp32 pipeline clips by the gradient norm of its first stage only. Larger gradients of
# other stages are not clipped, although "gradient_clipping" is set. No error, no warning. With ZeRO stage 1 the norm is
# that of all stages.
#
# The norm is summed over the ranks of a pipe, but only the first of them counts its parameters. Others count those marked
# as model-parallel. This suits tensor-parallel copies of a parameter, but ranks of a pipeline have different parameters.
#
# Output seen:
#   gradients 0.1 and 10, clipped to a norm of 1.0, ZeRO stage 0: 0.1 and 10.0
#   gradients 0.1 and 10, clipped to a norm of 1.0, ZeRO stage 1: 0.01 and 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy setuptools wheel
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install -qq --no-build-isolation deepspeed==0.19.8
cat > "$folder/run.py" <<'PYTHON'
import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an op of CPUs that takes a minute to compile
deepspeed.init_distributed("gloo")


def changes(zero_stage):
    """Return by how much a step changes the weights of both stages, whose gradients are 0.1 and 10."""
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for layer, weight in zip(layers, (1.0, 0.01)):
        nn.init.constant_(layer.weight, weight)
    model = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=lambda output, _: output.mean())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
    }
    before = next(model.parameters()).item()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    sample = torch.full((1, 1), 10.0)
    engine.train_batch(iter([(sample, sample)] * 2))
    both = [None, None]
    torch.distributed.all_gather_object(both, round(before - next(model.parameters()).item(), 3))
    return both


seen = [changes(zero_stage) for zero_stage in (0, 1)]
if torch.distributed.get_rank() == 0:
    for zero_stage, both in enumerate(seen):
        print(f"gradients 0.1 and 10, clipped to a norm of 1.0, ZeRO stage {zero_stage}: {both[0]} and {both[1]}")
assert seen == [[0.1, 10.0], [0.01, 1.0]], seen
torch.distributed.destroy_process_group()
PYTHON
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/run.py" 2> "$folder/log" | grep -v "^\[" || (cat "$folder/log"; false)
