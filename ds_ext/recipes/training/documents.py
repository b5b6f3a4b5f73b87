"""Documents in the samples of ``train_gpt.py``: end-of-document token, Megatron's flags, chat data."""

from __future__ import annotations

import argparse

from ..data.meta import has_chat, read_meta
from ..data.packing import DocumentOptions
from ..data.tokenizer import flagged_tokenizer


def document_options(args: argparse.Namespace) -> DocumentOptions:
    """Return the treatment of documents that the flags select.

    Chat data switches ``--reset-position-ids`` and ``--reset-attention-mask`` on, because a sample contains several
    conversations. Layers of transformers get samples of one conversation each.
    """
    packs = args.transformer_impl != "transformers"
    if packs and has_chat(args.data_path):
        args.reset_position_ids = args.reset_attention_mask = True
    starts = args.reset_position_ids or args.reset_attention_mask
    if not starts and not args.eod_mask_loss:
        return DocumentOptions(packs=packs)
    tokenizer = flagged_tokenizer(args)
    eod_id = tokenizer.eod_id if tokenizer is not None else (read_meta(args.data_path) or {}).get("eod_id")
    return DocumentOptions(starts, args.eod_mask_loss, eod_id, packs)
