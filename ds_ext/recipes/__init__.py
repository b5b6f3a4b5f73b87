"""Parts of the training scripts: models, data sets, the training loop, and conversion of checkpoints."""
