#!/bin/bash
# BitPipe's benchmark BERT: 64 layers, hidden size 2560, 5 billion parameters, PP 8.
#   DATA=my-bert_text_sentence examples/from_megatron/bert_bitpipe.sh [--dry-run] [flags]
set -euo pipefail
source "$(dirname "$0")/launch.sh"

launch 8 train_bert.py \
  --num-layers 64 --hidden-size 2560 --num-attention-heads 64 \
  --seq-length 512 --max-position-embeddings 512 \
  --pipeline-model-parallel-size 8 --enable-bitpipe-schedule \
  --micro-batch-size 4 --global-batch-size 32 --train-iters 500 \
  --lr 0.0001 --min-lr 1.0e-5 --lr-decay-style linear --lr-decay-iters 990000 --lr-warmup-fraction .01 \
  --weight-decay 1e-2 --clip-grad 1.0 --fp16 \
  --data-path "${DATA:-data/stdlib_bert}" --split 949,50,1 \
  --log-interval 10 --eval-interval 1000 --eval-iters 10 \
  "$@"
