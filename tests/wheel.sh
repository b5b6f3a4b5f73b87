#!/bin/bash
# Test a wheel in an empty environment without a compiler: tests/wheel.sh dist/ds_ext-*.whl
set -euo pipefail
unset PYTHONPATH
wheel=$(realpath "$1")
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The tools of this host without its compilers.
mkdir "$work/tools"
for file in /usr/bin/* /bin/*; do
  case ${file##*/} in
    cc | c++ | c89* | c99* | gcc* | g++* | clang* | cpp* | *-gcc* | *-g++* | *-cpp* | ninja) ;;
    *) ln -sf "$file" "$work/tools/" ;;
  esac
done

"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/python" -m pip install -qq --disable-pip-version-check -c "$root/constraints.txt" torch numpy
"$work/env/bin/python" -m pip install -qq --disable-pip-version-check -c "$root/constraints.txt" "$wheel"
export PATH="$work/env/bin:$work/tools" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
if command -v g++ gcc cc; then echo "a compiler is left in PATH" >&2; exit 1; fi

cd "$work"
cp "$root"/examples/own_model.py "$root"/examples/own_model.json .
python - "$work/env" <<'PYTHON'
import sys
from ds_ext.comm import _native
assert _native.__file__.startswith(sys.argv[1]), _native.__file__
print("native module", _native.__file__)
PYTHON
python -m ds_ext show bitpipe --num-devices 4 --micro-batches 4
python -m ds_ext show bitpipe --num-devices 4 --micro-batches 4 -o bitpipe.html
python -m ds_ext doctor
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
sed -i 's/metrics = ds_ext.Metrics(engine, total_steps=STEPS)/metrics = ds_ext.Metrics(engine, total_steps=STEPS, file="steps.jsonl")/' own_model.py
torchrun --nproc_per_node 4 --master_port "$port" own_model.py --deepspeed_config own_model.json
deepspeed --num_gpus 4 --master_port "$port" own_model.py --deepspeed_config own_model.json
python - <<'PYTHON'
import json
rows = [json.loads(line) for line in open("steps.jsonl")]
assert len(rows) == 80 and all(row["transport"] == "shm" for row in rows), rows[0]
assert rows[39]["loss"] < rows[0]["loss"] / 10 and abs(rows[79]["loss"] / rows[39]["loss"] - 1) < 0.01
print(f"trained twice over shared memory: loss {rows[0]['loss']:.4f} to {rows[39]['loss']:.4f}")
PYTHON
