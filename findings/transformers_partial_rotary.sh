#!/usr/bin/env bash
# transformers 5.16.0: GLM-4.5 with rope_parameters of type "llama3" and "partial_rotary_factor": 1.0 rotates half of each
# head. With type "default" it rotates whole heads. No error, no warning, and the config still prints 1.0 until a model is
# built, and 0.5 then.
#
# The class has the older key beside rope_parameters, with a default of 0.5. Building scaled frequencies standardizes the
# config once more, which copies the older key over the newer one. 5.24.0 rotates whole heads. A config with both keys
# is right in both versions.
#
# Output seen (numbers that are rotated of a head of 8, and the factor before and after the model was built):
#   5.16.0 default: 8 of 8, factor 1.0, then 1.0
#   5.16.0 llama3: 4 of 8, factor 1.0, then 0.5
#   5.16.0 llama3, both keys: 8 of 8, factor 1.0, then 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy transformers==5.16.0
cat > "$folder/run.py" <<'PYTHON'
import transformers
from transformers import Glm4MoeConfig, Glm4MoeModel

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
SCALED = DEFAULT | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def rotated(label, rope_parameters, **more):
    config = Glm4MoeConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, vocab_size=64, max_position_embeddings=64,
        rope_parameters=dict(rope_parameters), **more,
    )
    before = config.rope_parameters["partial_rotary_factor"]
    numbers = 2 * Glm4MoeModel(config).rotary_emb.inv_freq.numel()
    after = config.rope_parameters["partial_rotary_factor"]
    print(f"{transformers.__version__} {label}: {numbers} of 8, factor {before}, then {after}")
    return numbers, before, after


assert rotated("default", DEFAULT) == (8, 1.0, 1.0)
assert rotated("llama3", SCALED) == (4, 1.0, 0.5)
assert rotated("llama3, both keys", SCALED, partial_rotary_factor=1.0) == (8, 1.0, 1.0)
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2> "$folder/log" || (cat "$folder/log"; false)
