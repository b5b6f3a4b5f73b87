"""train_bert.py from text to a saved checkpoint."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ext.config.job import JobConfig
from ds_ext.errors import ConfigError
from ds_ext.recipes.data.meta import read_meta
from ds_ext.recipes.models.bert import BertConfig
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.recipes.training.checkpoint_fit import check_load
from ds_ext.recipes.training.setup import model_fields
from tests.launch.forked import ForkedJob, run_forked
from tests.launch.jobs import ROOT, tiny_config, write_json
from tests.plans import plan_job


def test_bert_trains_on_ranks_and_its_data_are_refused_for_gpt(
    bert_corpus: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    data, metrics, saved = bert_corpus, tmp_path / "metrics.jsonl", tmp_path / "saved"
    config = tiny_config(data)
    config["ds_ext"]["train"] |= {"seq_length": 24, "train_iters": 4, "bert_no_binary_head": False}
    write_json(tmp_path / "bert.json", config)
    flags = [
        "--deepspeed_config",
        "bert.json",
        "--metrics-file",
        str(metrics),
        "--save",
        str(saved),
        "--verbose",
    ]
    with ForkedJob([[str(ROOT / "train_bert.py"), *flags]] * 2, tmp_path, port=free_port()) as job:
        assert [rank.returncode for rank in job.wait()] == [0, 0], job.text
        text = job.text
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    # At the start every word and either order are equally likely, or nearly so.
    assert 4 < records[0]["loss"] < 7 and records[-1]["consumed_samples"] == 32
    assert "embedding, positions and types, layer 0" in text and "heads, words, bias" in text
    assert "unigram entropy plus ln 2 of" in text and (saved / "latest").read_text().strip() == "step_4"

    # The perplexity is of the masked words alone.
    printed = re.search(
        r"validation loss ([\d.]+) \(masked words ([\d.]+), sentence order ([\d.]+)\), perplexity ([\d.]+)",
        text,
    )
    assert printed is not None, text
    loss, masked, order, perplexity = map(float, printed.groups())
    assert loss == pytest.approx(masked + order, abs=2e-4) and 0.4 < order < 1.2
    assert perplexity == pytest.approx(math.exp(masked), rel=1e-3)

    words = ["--deepspeed_config", str(tmp_path / "bert.json"), "--dry-run", "--load", str(saved)]
    size = (read_meta([str(data)]) or {})["vocab_size"]

    def make_config(args: argparse.Namespace, job: JobConfig | None) -> BertConfig:
        return BertConfig(**model_fields(args, job), vocab_size=size, order_classes=2)

    args, plan = plan_job("train_bert.py", words, "bert", make_config)
    sizes = {**model_fields(args, plan.job), "vocab_size": size}
    with pytest.raises(ConfigError, match=r"classifier\.weight 2 x 16, here missing"):
        check_load(args, BertConfig(**sizes, order_classes=None))
    with pytest.raises(ConfigError, match=r"got 1\.weight missing, here 24 x 16"):
        check_load(args, GPTConfig(**sizes))

    del config["ds_ext"]["train"]["bert_no_binary_head"]
    write_json(tmp_path / "gpt.json", config)
    words = [str(ROOT / "train_gpt.py"), "--deepspeed_config", "gpt.json", "--dry-run"]
    (done,) = run_forked([words], tmp_path)
    assert done.returncode == 2 and "train_bert.py" in done.stderr, done.stderr
