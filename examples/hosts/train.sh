#!/bin/bash
# Train over several hosts: check every host and every pair of hosts, then launch. See docs/clusters.md.
#   train.sh HOSTFILE [script and its flags]
# The hostfile has one line per host: its name, and its number of ranks. Every host needs this folder at the same path,
# and ssh without a password from the host that starts the job.
set -euo pipefail
hostfile=$1
shift
if [ $# = 0 ]; then set -- train_gpt.py --deepspeed_config configs/bitpipe.json; fi

python -m ds_ext doctor --hostfile "$hostfile"
exec deepspeed --hostfile "$hostfile" "$@"
