#!/bin/bash
# Fine-tune a Llama, Mistral, Qwen2, Qwen3 or GPT-2 from a Hugging Face folder: finetune.sh MODEL TEXT OUT [flags]
#   MODEL  folder with config.json, *.safetensors and the tokenizer
#   TEXT   folder of text files, or a .jsonl file with the key "text"
#   OUT    new folder: data, checkpoints, and the trained model in OUT/hf
# Further flags go to train_gpt.py: finetune.sh llama_hf texts out --train-iters 1000 --seq-length 4096
set -euo pipefail
model=$1 text=$2 out=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)

mkdir -p "$out"
python -m ds_ext prepare --tokenizer "$model" --source "$text" --output "$out/data"
torchrun --nproc_per_node "${RANKS:-4}" --master_port "${PORT:-29500}" "$here/../../train_gpt.py" \
  --deepspeed_config "${CONFIG:-$here/finetune.json}" \
  --hf-model "$model" --data-path "$out/data" --save "$out/checkpoints" "$@"
python -m ds_ext convert "$out/checkpoints" --to hf "$out/hf" --tokenizer "$model"
