#!/bin/bash
# MegaFBD's GPT: 16 layers, hidden size 2048, TP 2 x PP 2. One forward rank per stage serves both tensor-parallel ranks,
# so the job has 2 forward and 4 backward ranks.
#   examples/from_megatron/gpt_fbd.sh [--dry-run] [flags]
set -euo pipefail
source "$(dirname "$0")/launch.sh"

launch 6 train_gpt.py \
  --num-layers 16 --hidden-size 2048 --num-attention-heads 32 \
  --seq-length 2048 --max-position-embeddings 2048 \
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
  --forward-backward-disaggregating --ignore-forward-tensor-parallel \
  --micro-batch-size 2 --global-batch-size 32 --train-iters 20 \
  --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction .01 \
  --weight-decay 1e-2 --clip-grad 1.0 --fp16 --transformer-impl local \
  --data-path "${DATA:-data/stdlib}" --split 949,50,1 \
  --log-interval 1 --eval-interval 20 --eval-iters 10 \
  "$@"
