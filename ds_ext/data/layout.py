"""File names in a folder of prepared data."""

DATA_NAME = "text_document"
LOSS_MASK_NAME = "loss_mask"
META_NAME = "meta.json"
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt")
