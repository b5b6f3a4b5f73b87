# Sourced by the scripts of this folder: launch RANKS SCRIPT FLAGS...
# With --dry-run among the flags, it prints the plan of the job instead, without ranks and GPUs.
#   GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as for torchrun; run the script on every host

launch() {
  local ranks=$1 script=$2
  shift 2
  local root nnodes=${NNODES:-1}
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
  if [[ " $* " == *" --dry-run "* ]]; then
    local hosts=()
    [[ " $* " == *" --hosts"* ]] || hosts=(--hosts "${nnodes}x$((ranks / nnodes))")
    exec python "$root/$script" "$@" "${hosts[@]}"
  fi
  exec torchrun --nproc_per_node "${GPUS_PER_NODE:-$((ranks / nnodes))}" --nnodes "$nnodes" \
    --node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "${MASTER_PORT:-6000}" \
    "$root/$script" "$@"
}
