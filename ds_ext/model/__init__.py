"""Description of a model: sizes, flags, config.json of transformers, and files of prepared data. Without torch."""
