"""Hosts of a dry run: the table of groups that cross hosts, and flags that contradict the job."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_ext.errors import ConfigError
from ds_ext.model.config import TransformerConfig
from ds_ext.recipes.training.hosts import hosts_of_flags
from ds_ext.recipes.training.job import TrainingJob, stage_boundaries
from ds_ext.recipes.training.setup import model_fields
from tests.plans import plan_job

ROOT = Path(__file__).parents[4]
BEFORE, AFTER = ["embedding", "positions"], ["final norm", "head"]
LAUNCHER = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_WORLD_SIZE", "CROSS_SIZE", "RANK")


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function (name, *flags, **section) that returns the text of --dry-run for configs/NAME.json."""
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)

    def run(
        name: str,
        *flags: str,
        dry_run: bool = True,
        verbose: bool = True,
        divides_head: bool = True,
        **section: Any,
    ) -> str:
        job = json.loads((ROOT / "configs" / f"{name}.json").read_text())
        job["ds_ext"] |= section
        (tmp_path / "job.json").write_text(json.dumps(job))
        words = ["--deepspeed_config", "job.json", *["--dry-run"] * dry_run, *["--verbose"] * verbose, *flags]
        args, plan = plan_job("train_gpt.py", words, "gpt")
        model = TransformerConfig(**model_fields(args, plan.job), vocab_size=1000)
        boundaries = stage_boundaries(args, plan, BEFORE, AFTER, model)
        job_of_script = TrainingJob(args, plan, model, BEFORE, AFTER, boundaries)
        return job_of_script.with_stage_work(divides_head).describe(hosts_of_flags(args))

    return run


def table(text: str) -> dict[str, list[int]]:
    """Return [size, groups, groups that cross hosts] by group."""
    rows = re.findall(
        r"^  (tensor|neighbors|mirror|data|gradients|weights) +(\d+) +(\d+) +(\d+)(?: |$)", text, re.M
    )
    return {name: [int(number) for number in numbers] for name, *numbers in rows}


@pytest.mark.parametrize(("layers", "remedies"), [(8, 2), (4, 3)])
def test_the_plan_counts_the_head_and_names_a_slow_stage(described: Any, layers: int, remedies: int) -> None:
    """With 4 layers, the head takes longer than any other stage, so that fewer stages are a remedy too."""
    size = ["--hidden-size", "8", "--num-layers", str(layers)]
    even, balanced = (
        described("1f1b", *size, "--stage-layers", stages, verbose=False)
        for stages in (",".join([str(layers // 4)] * 4), "balanced")
    )
    before, after = (re.findall(r"^bubble +([\d.]+)%", text, re.M)[0] for text in (even, balanced))
    (note,) = re.findall(r"^note: (stage 3 takes .*)", even, re.M)
    assert float(before) > float(after) > 27.3  # that of equal stages
    assert f"{after}%" in note and note.count(";") == remedies
    assert ("note: stage" in balanced) == (remedies == 3)


@pytest.mark.parametrize("untied", [False, True])
def test_a_slow_stage_may_divide_its_head(described: Any, untied: bool) -> None:
    """The note has the bubble that the plan of the job with the flag prints."""
    size = ["--hidden-size", "8", "--num-layers", "8", *["--untie-embeddings-and-output-weights"] * untied]
    whole, parts = (
        described("1f1b", *size, "--stage-layers", "2,2,2,2", verbose=False, vocabulary_parallel_head=value)
        for value in (False, True)
    )
    (note,) = re.findall(r"^note: stage 3 takes .*", whole, re.M)
    (bubble,) = re.findall(r"^bubble +([\d.]+%)", parts, re.M)
    assert f"--vocabulary-parallel-head gives a bubble of {bubble}" in note
    whole = described("1f1b", *size, "--stage-layers", "2,2,2,2", verbose=False, divides_head=False)
    assert "--stage-layers balanced gives" in whole and "--vocabulary-parallel-head gives" not in whole
    assert "--vocabulary-parallel-head" not in parts


def test_the_short_plan_has_the_bytes_and_the_notes(described: Any) -> None:
    whole, short = (
        described("bitpipe_3d", "--hosts", "2x4", verbose=False, print_plan=value) for value in ("all", True)
    )
    assert table(whole) and not table(short)
    lines = short.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("hosts "))
    assert [line.split()[0] for line in lines[start:]] == ["hosts", "note:"]
    (total,) = re.findall(r"^  total +(.*) per step$", whole, re.M)
    assert total in lines[start]


def test_groups_of_bitpipe_3d_on_two_hosts(described: Any) -> None:
    text = described("bitpipe_3d", "--hosts", "2x4")
    everything_else = {"tensor": [2, 4, 0], "neighbors": [2, 8, 8], "mirror": [2, 4, 4]}
    assert table(text) == everything_else | {"data": [2, 4, 0], "gradients": [4, 2, 2]}
    assert re.search(r'^note: ds_ext\.rank_order: "tp-pp-dp" .* MB .* MB;', text, re.M)
    better = described("bitpipe_3d", "--hosts", "4,4", "--use-tp-pp-dp-mapping")
    assert table(better)["mirror"] == [2, 4, 0] and table(better)["data"] == [2, 4, 4]
    assert "note: ds_ext.rank_order" not in better
    assert "warning" not in better


def test_slices_send_the_bytes_of_whole_samples(described: Any) -> None:
    texts = [
        described("1f1b", "--hosts", "2x2", sequence_slices=k, slice_lengths=lengths)
        for k, lengths in ((1, "equal"), (4, "equal"), (4, [64, 32, 16, 16]))
    ]
    (whole,), (equal,), (longest,) = (
        re.findall(r"^messages .* ([\d,]+) bytes each$", text, re.M) for text in texts
    )
    sizes = [int(text.replace(",", "")) for text in (whole, equal, longest)]
    assert sizes == [sizes[0], sizes[0] // 4, sizes[0] // 2]
    totals = {tuple(re.findall(r"^  total +(.*) per step$", text, re.M)) for text in texts}
    assert len(totals) == 1 and all(totals)


def test_one_host_adds_nothing(described: Any) -> None:
    """Without hosts, a note says that only one pipeline group is planned."""
    assert table(described("bitpipe_3d", "--hosts", "1x8")) == {}
    flags = "--attention-dropout", "0"  # whose memory is that of GPUs with --hosts
    known, unknown = (described("bitpipe_3d", *flags, *hosts) for hosts in (("--hosts", "1x4"), ()))
    (note,) = set(unknown.splitlines()) - set(known.splitlines())
    assert note.startswith("note: ") and "--hosts" in note and set(known) <= set(unknown)


def test_a_dry_run_with_hosts_plans_for_gpus(described: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with dropout stores its scores on CPUs only."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def activations_mb(*flags: str) -> float:
        found = re.search(r"^memory .*activations ([\d.]+) MB", described("bitpipe_3d", *flags), re.M)
        assert found is not None
        return float(found[1])

    assert activations_mb("--hosts", "1x4") < 0.7 * activations_mb()
    without = "--attention-dropout", "0"
    assert activations_mb(*without, "--hosts", "1x4") == activations_mb(*without)


def test_tensor_parallel_groups_between_hosts_are_a_warning(described: Any) -> None:
    text = described("bitpipe_3d", "--hosts", "3,5")
    assert table(text)["tensor"] == [2, 4, 1]
    assert re.search(r"^warning: tensor_parallel_size: 1 of 4 .*3,5", text, re.M)


def test_the_hosts_of_a_launcher(described: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--attention-dropout", "0"
    expected = described("bitpipe_3d", *flags, "--hosts", "2x4")
    for local, count in (("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), ("LOCAL_SIZE", "CROSS_SIZE")):
        with monkeypatch.context() as launcher:
            for name, value in (("WORLD_SIZE", "8"), (local, "4"), (count, "2")):
                launcher.setenv(name, value)
            text = described("bitpipe_3d", *flags)
            assert text.startswith(expected) and text.splitlines()[-1].startswith("note: --hosts: ")
            # 4 ranks here and 4 on two other hosts together: their slots are unknown.
            launcher.setenv(count, "3")
            assert table(described("bitpipe_3d")) == {}
            with pytest.raises(ConfigError, match=r"--hosts: .* 8 .*3x4, 12 "):
                described("bitpipe_3d", "--hosts", "3x4")


def test_hosts_that_do_not_fit(described: Any) -> None:
    with pytest.raises(ConfigError, match=r"--hosts: .*--dry-run.*2x4"):
        described("bitpipe_3d", "--hosts", "2x4", dry_run=False)
    with pytest.raises(ConfigError, match=r"world size: .* 4 .*got 6\)"):
        described("bitpipe_3d", "--hosts", "2x3")


def test_forward_hosts_of_a_hostfile(described: Any, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("big slots=4\nsmall slots=4\n")
    assert described("fbd", "--hosts", str(path)).count("hosts     ") == 1
    text = described("fbd", "--hosts", str(path), fbd={"forward_hosts": ["small"]})
    found = table(text)
    assert found["weights"] == [2, 4, 4]
    assert "[4,5,6,7]" in text  # the forward ranks
    with pytest.raises(ConfigError, match=r"fbd\.forward_hosts: .*'small'"):
        described("fbd", "--hosts", "2x4", fbd={"forward_hosts": ["small"]})


def test_bytes_are_those_of_the_messages(described: Any) -> None:
    """With one stage on each of two hosts, every message crosses."""
    text = described("bitpipe_3d", "--hosts", "2x1", schedule="1f1b", tensor_parallel_size=1)
    messages = re.search(r"^messages +(\d+) per step and pipeline group, ([\d,]+) bytes each$", text, re.M)
    found = re.search(r"^  neighbors .* ([\d.]+) MB$", text, re.M)
    assert messages is not None and found is not None
    expected = int(messages[1]) * int(messages[2].replace(",", ""))
    assert float(found[1]) == pytest.approx(expected / 1e6, abs=0.05)
    assert re.search(r"^  tied +2 +1 +1 +[\d.]+ MB$", text, re.M)
