"""Find what limits a run from its traces: the busiest rank, the slowest stage and the slowest link.

    torchrun --nproc_per_node 4 examples/own_model.py --deepspeed_config examples/trace/traced.json
    python examples/trace/read_trace.py traces

`python -m ds_ext trace summary traces` prints these figures, and `trace view` draws them. This script reads them for
programs of your own, such as a check after every run.
"""

import json
import subprocess
import sys


def main(folder: str) -> None:
    """Print the summary of the traces in ``folder``."""
    command = [sys.executable, "-m", "ds_ext", "trace", "summary", folder, "--json"]
    summary = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    busiest = max(summary["ranks"], key=lambda rank: rank["busy"])
    print(f"step       {summary['step_s'] * 1e3:.1f} ms, bubble {summary['bubble']:.1%}")
    print(f"busiest    rank {busiest['rank']} computes {busiest['busy']:.1%} of the step")
    print(json.dumps({name: summary[name] for name in ("slowest_stage", "slowest_link")}))


if __name__ == "__main__":
    main(sys.argv[1])
