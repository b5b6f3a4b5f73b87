#!/usr/bin/env bash
# torch 2.13.0: a gradient hook on the output of nn.Linear is lost if the next operation changes that output in place and
# the input had three dimensions. With two dimensions it is called. No error, no warning.
#
# The output of a Linear with a (batch, sequence, features) input is a view of a matrix. An in-place operation on a view
# gives it a new node in the graph, and the node with the hook is no part of the graph anymore. A forward hook that
# registers tensor hooks, to log or scale gradients, then depends on the shape of the samples.
#
# Output seen:
#   input (2, 3): view False, hook calls 1, gradient of the weight scaled by 0.50
#   input (2, 2, 3): view True, hook calls 0, gradient of the weight scaled by 1.00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch import nn

calls = []


def half(gradient):
    calls.append(gradient)
    return gradient / 2


def weight_gradient(shape, hooked):
    torch.manual_seed(0)
    layer, calls[:] = nn.Linear(3, 3), []
    output = layer(torch.randn(shape))
    is_view = output._is_view()
    if hooked:
        output.register_hook(half)
    torch.tanh_(output).sum().backward()
    return layer.weight.grad, is_view


seen = []
for shape in ((2, 3), (2, 2, 3)):
    plain, _ = weight_gradient(shape, hooked=False)
    found, is_view = weight_gradient(shape, hooked=True)
    scale = float(found.norm() / plain.norm())
    print(f"input {shape}: view {is_view}, hook calls {len(calls)}, gradient of the weight scaled by {scale:.2f}")
    seen.append((is_view, len(calls), round(scale, 2)))
assert seen == [(False, 1, 0.5), (True, 0, 1.0)], seen
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
