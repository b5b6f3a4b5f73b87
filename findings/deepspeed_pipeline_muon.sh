#!/usr/bin/env bash
# DeepSpeed 0.19.8: in a PipelineModule, Muon also trains the embedding and the output projection. The same layers with the
# same JSON in a plain model get Adam for these two. No error, no warning.
#
# deepspeed.initialize() chooses Muon for all matrices whose names do not contain "embed" or "lm_head". A PipelineModule
# names its layers by their numbers: "0.weight".
#
# Output seen (the layers that change if the learning rate of Adam is zero):
#   plain model: Muon trains hidden
#   pipeline: Muon trains embed, hidden, lm_head
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy setuptools wheel
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install -qq --no-build-isolation deepspeed==0.19.8
cat > "$folder/run.py" <<'PYTHON'
from collections import OrderedDict

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.nn.functional import cross_entropy

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an op of CPUs that takes a minute to compile
deepspeed.init_distributed("gloo")
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.0, "torch_adam": True}},
}
tokens, labels = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))


def trained_layers(pipeline):
    """Return the names of the layers that a step changes if the learning rate of Adam is zero."""
    torch.manual_seed(0)
    layers = OrderedDict(embed=nn.Embedding(16, 8), hidden=nn.Linear(8, 8), lm_head=nn.Linear(8, 16))
    before = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    if pipeline:
        model = PipelineModule(list(layers.values()), num_stages=1, loss_fn=cross_entropy)
    else:
        model = nn.Sequential(layers)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    if pipeline:
        engine.train_batch(iter([(tokens, labels)]))
    else:
        engine.backward(cross_entropy(engine(tokens), labels))
        engine.step()
    return [name for name, layer in layers.items() if not torch.equal(layer.weight, before[name])]


seen = [trained_layers(pipeline) for pipeline in (False, True)]
for kind, names in zip(("plain model", "pipeline"), seen):
    print(f"{kind}: Muon trains {', '.join(names)}")
assert seen == [["hidden"], ["embed", "hidden", "lm_head"]], seen
torch.distributed.destroy_process_group()
PYTHON
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
"$folder/venv/bin/torchrun" --standalone "$folder/run.py" 2> "$folder/log" | grep -v "^\[" || (cat "$folder/log"; false)
