"""Command ``python -m ds_ext convert``: checkpoints to and from folders of Hugging Face's transformers.

It runs in one process without a process group. It reads one weight at a time, so the model need not fit in memory,
except for the models of ``from_transformers``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

SHARD_GB = 5.0
EPILOG = """\
examples:
  python -m ds_ext convert checkpoints/gpt --to hf gpt_hf            # latest checkpoint
  python -m ds_ext convert checkpoints/gpt/step_200 --to hf gpt_hf
  python -m ds_ext convert finetuned --to hf gemma_trained --hf-model gemma_folder
  python -m ds_ext convert llama_folder --from hf checkpoints/llama  # then: train_gpt.py --load checkpoints/llama
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="folder of checkpoints, one checkpoint, or folder of a Hugging Face model",
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="new folder")
    directions = parser.add_mutually_exclusive_group(required=True)
    directions.add_argument(
        "--to", choices=["hf"], help="convert a checkpoint to safetensors and config.json"
    )
    directions.add_argument(
        "--from", choices=["hf"], dest="origin", help="convert such files to a checkpoint at step 0"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="with --to: the model's tokenizer.json, or the folder of the training data",
    )
    parser.add_argument(
        "--hf-model",
        type=Path,
        metavar="FOLDER",
        help="with --to: the trained folder, for a checkpoint with the layers of from_transformers",
    )
    parser.add_argument(
        "--num-attention-heads",
        type=int,
        metavar="N",
        help="with --to: attention heads, if the checkpoint does not contain them",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="with --to: dtype of the weights in the files (default float32)",
    )
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        metavar="GB",
        help=f"with --to: maximum size of a file (default {SHARD_GB:g}), unless a single weight is larger",
    )


def run(args: argparse.Namespace) -> int:
    from ...errors import ConfigError

    only_to = ("tokenizer", "hf_model", "num_attention_heads", "dtype", "max_shard_gb")
    unused = [f"--{name.replace('_', '-')}" for name in only_to if getattr(args, name) is not None]
    if args.origin is not None:
        if unused:
            raise ConfigError(f"{unused[0]}: only valid with --to (got --from). Omit it.")
        from .from_hf import write_checkpoint

        print(write_checkpoint(args.source, args.output))
        return 0
    from .to_hf import write_hf_folder

    limit = SHARD_GB if args.max_shard_gb is None else args.max_shard_gb
    if not limit > 0:
        raise ConfigError(f"--max-shard-gb: must be above 0 (got {limit:g}).")
    dtype = args.dtype or "float32"
    heads = args.num_attention_heads
    if args.hf_model is not None:
        if ignored := [flag for flag in ("--tokenizer", "--num-attention-heads") if flag in unused]:
            raise ConfigError(f"{ignored[0]}: the folder of --hf-model has it (got both). Omit it.")
        from .decoder import write_decoder_folder

        print(write_decoder_folder(args.source, args.output, args.hf_model, round(limit * 1e9), dtype))
        return 0
    print(write_hf_folder(args.source, args.output, args.tokenizer, heads, round(limit * 1e9), dtype))
    return 0
