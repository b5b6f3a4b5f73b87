#!/bin/bash
# BitPipe's benchmark GPT: 96 layers, hidden size 3072, 11 billion parameters, PP 8.
#   DATA=my-gpt2_text_document examples/from_megatron/gpt_bitpipe.sh [--dry-run] [flags]
set -euo pipefail
source "$(dirname "$0")/launch.sh"

launch 8 train_gpt.py \
  --num-layers 96 --hidden-size 3072 --num-attention-heads 32 \
  --seq-length 1024 --max-position-embeddings 1024 \
  --pipeline-model-parallel-size 8 --enable-bitpipe-schedule \
  --micro-batch-size 1 --global-batch-size 16 --train-iters 500 \
  --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction .01 \
  --weight-decay 1e-2 --clip-grad 1.0 --fp16 \
  --data-path "${DATA:-data/stdlib}" --split 949,50,1 \
  --log-interval 10 --eval-interval 1000 --eval-iters 10 \
  "$@"
