#!/bin/bash
# GPT with 3D parallelism, TP 2 x PP 2 x DP 2, with Megatron's 1F1B order. Add --schedule bitpipe for a smaller bubble.
#   examples/from_megatron/gpt_3d.sh [--dry-run] [flags]
set -euo pipefail
source "$(dirname "$0")/launch.sh"

launch 8 train_gpt.py \
  --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
  --seq-length 1024 --max-position-embeddings 1024 \
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \
  --micro-batch-size 4 --global-batch-size 64 --train-iters 500 \
  --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction .01 \
  --weight-decay 1e-2 --clip-grad 1.0 --bf16 \
  --data-path "${DATA:-data/stdlib}" --split 949,50,1 \
  --log-interval 10 --eval-interval 1000 --eval-iters 10 \
  "$@"
