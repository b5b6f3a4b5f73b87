"""``python -m ds_ext convert``: checkpoints to and from folders of Hugging Face's transformers.

One process, no process group. Weights are read one after the other, so that neither side has to fit into memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

SHARD_GB = 5.0
EPILOG = """\
examples:
  python -m ds_ext convert checkpoints/gpt --to hf gpt_hf            # the current checkpoint
  python -m ds_ext convert checkpoints/gpt/step_200 --to hf gpt_hf
  python -m ds_ext convert gpt2_folder --from hf checkpoints/gpt2    # then: train_gpt.py --load checkpoints/gpt2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb `convert`."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a folder of checkpoints, one of them, or a model's folder",
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="a new folder")
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--to", choices=["hf"], help="a checkpoint to safetensors and config.json")
    ways.add_argument("--from", choices=["hf"], dest="origin", help="these to a checkpoint at step 0")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="with --to: its tokenizer.json, or the folder of the data",
    )
    parser.add_argument(
        "--num-attention-heads", type=int, metavar="N", help="with --to: when the checkpoint does not say it"
    )
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        metavar="GB",
        help=f"with --to: a file has no more than this ({SHARD_GB:g}) unless one weight has",
    )


def run(args: argparse.Namespace) -> int:
    """Convert; returns the exit code 0.

    Raises:
        ConfigError: something cannot be read, converted or written.
        CheckpointError: the checkpoint is damaged.
    """
    from ..errors import ConfigError

    only_to = ("tokenizer", "num_attention_heads", "max_shard_gb")
    given = [f"--{name.replace('_', '-')}" for name in only_to if getattr(args, name) is not None]
    if args.origin is not None:
        if given:
            raise ConfigError(f"{', '.join(given)} cannot go with --from: the model's folder says it.")
        from .from_hf import from_hf

        print(from_hf(args.source, args.output))
        return 0
    from .to_hf import to_hf

    limit = SHARD_GB if args.max_shard_gb is None else args.max_shard_gb
    if not limit > 0:
        raise ConfigError(f"--max-shard-gb must be more than 0; got {limit:g}.")
    print(to_hf(args.source, args.output, args.tokenizer, args.num_attention_heads, round(limit * 1e9)))
    return 0
