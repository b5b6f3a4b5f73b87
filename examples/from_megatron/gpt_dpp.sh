#!/bin/bash
# MegaDPP's GPT on two hosts: 16 layers, hidden size 2048, TP 4 x PP 2, 4 chunks per device.
# On the first host:   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 NODE_IPS=10.0.0.1,10.0.0.2 examples/from_megatron/gpt_dpp.sh
# On the second host:  NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 NODE_IPS=10.0.0.1,10.0.0.2 examples/from_megatron/gpt_dpp.sh
# MegaDPP's --workload, --num-gpus and --multi-node are not needed. Its chunks are in dpp.json.
set -euo pipefail
source "$(dirname "$0")/launch.sh"

launch 8 train_gpt.py --deepspeed_config "$(dirname "$0")/dpp.json" \
  --num-layers 16 --hidden-size 2048 --num-attention-heads 32 \
  --seq-length 2048 --max-position-embeddings 2048 \
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --use-dpp ${NODE_IPS:+--node-ips "$NODE_IPS"} \
  --micro-batch-size 2 --global-batch-size 32 --train-iters 20 \
  --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction .01 \
  --weight-decay 1e-2 --clip-grad 1.0 --fp16 \
  --data-path "${DATA:-data/stdlib}" --split 949,50,1 \
  --log-interval 1 --eval-interval 20 --eval-iters 10 ${TENSORBOARD:+--tensorboard-dir "$TENSORBOARD"} \
  "$@"
