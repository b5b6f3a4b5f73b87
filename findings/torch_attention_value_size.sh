#!/usr/bin/env bash
# torch 2.13.0 on CPUs: scaled_dot_product_attention keeps all tokens x tokens scores for its backward if values have
# another size per head than queries and keys, although none of its arguments asks for them. With equal sizes it keeps
# none. Models with latent attention (DeepSeek-V2 and V3: 192 and 128) have different sizes, so their memory grows with
# the square of the length; padded values avoid it.
#
# Output seen (dtype, size of a value, bytes kept besides inputs and output, relative to one tensor of scores):
#   torch.float32 24 0.0
#   torch.float32 16 1.09
#   torch.bfloat16 24 0.0
#   torch.bfloat16 16 2.25
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention

BATCH, HEADS, TOKENS = 1, 4, 512


def saved_bytes(key_size, value_size, dtype):
    """Bytes of distinct tensors that the backward reads, besides queries, keys and values."""
    sizes = key_size, key_size, value_size
    inputs = [torch.randn(BATCH, HEADS, TOKENS, n, dtype=dtype, requires_grad=True) for n in sizes]
    known, found = {t.untyped_storage().data_ptr() for t in inputs}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = scaled_dot_product_attention(*inputs, is_causal=True)
    known_output = found.get(output.untyped_storage().data_ptr(), 0)
    return sum(found.values()) - known_output


for dtype in (torch.float32, torch.bfloat16):
    scores = BATCH * HEADS * TOKENS * TOKENS * dtype.itemsize
    for value_size in (24, 16):
        kept = saved_bytes(24, value_size, dtype) / scores
        print(dtype, value_size, round(kept, 2))
        assert (kept > 1) == (value_size != 24), kept
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
