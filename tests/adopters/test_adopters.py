"""Scripts in the shape of four DeepSpeed projects, under DeepSpeed's engine and under this one.

The scripts import DeepSpeed. For ds_ext, the test replaces their import lines (``IMPORTS``) and adds one section to
the JSON. Nothing else changes, and the losses must be equal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.losses import learned
from tests.ranks import Ranks
from tests.selection import select

FOLDER = Path(__file__).parent
EXACT = ("names", "frozen")  # results that are not numbers
IMPORTS = {
    "from deepspeed import initialize": "from ds_ext import initialize",
    "from deepspeed.pipe import PipelineModule": "from ds_ext import PipelineModule",
    "from deepspeed.pipe import LayerSpec, PipelineModule": (
        "from deepspeed.pipe import LayerSpec\nfrom ds_ext import PipelineModule"
    ),
    "from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec": (
        "from deepspeed.pipe import LayerSpec, TiedLayerSpec\nfrom ds_ext import PipelineModule"
    ),
    "from deepspeed.runtime.pipe.engine import PipelineEngine": "from ds_ext.engine import PipelineEngine",
}
# DeepSpeed clips to 1.0 by default. Without ZeRO, its norm counts only the first stage, so nothing is clipped here.
BATCH = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
ZERO = {"zero_optimization": {"stage": 1}}


def run_script(
    rank: int, name: str, config: str, arguments: tuple[Any, ...], with_ds_ext: bool
) -> dict[str, Any]:
    """Run a script as ``deepspeed SCRIPT --deepspeed_config CONFIG`` on this rank and return the result of main()."""
    path = FOLDER / f"{name}.py"
    lines = path.read_text().splitlines()
    if with_ds_ext:
        lines = [IMPORTS.get(line, line) for line in lines]
    namespace: dict[str, Any] = {"__name__": name}
    words, sys.argv = sys.argv, [str(path), "--deepspeed_config", config]
    try:
        exec(compile("\n".join(lines), str(path), "exec"), namespace)
        return namespace["main"](*arguments)
    finally:
        sys.argv = words


class Adopters:
    """Results of the scripts under DeepSpeed, each computed once, and under ds_ext."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._of_deepspeed: dict[str, list[dict[str, Any]]] = {}

    def run(self, name: str, schedule: str | None, json_keys: dict[str, Any], *arguments: Any) -> list[Any]:
        """Return the results by rank. Strings in ``arguments`` are names in a new folder.

        Args:
            schedule: schedule of ds_ext; None: DeepSpeed's engine.
        """
        key = f"{name}_{schedule}_{len(list(self._folder.iterdir()))}"
        folder = self._folder / key
        folder.mkdir()
        config = {**BATCH, **json_keys}
        if schedule is not None:
            config["ds_ext"] = {"schedule": schedule}
        path = folder / "ds_config.json"
        path.write_text(json.dumps(config))
        words = {"CONFIG": str(path), "FOLDER": str(folder / "checkpoints")}
        given = tuple(words.get(value, value) if isinstance(value, str) else value for value in arguments)
        return self._ranks(4).run(run_script, name, str(path), given, schedule is not None, timeout_s=120)

    def deepspeed(self, name: str, json_keys: dict[str, Any], *arguments: Any) -> list[Any]:
        """Return the results by rank under DeepSpeed's engine, with 4 stages."""
        key = repr((name, json_keys, arguments))
        if key not in self._of_deepspeed:
            self._of_deepspeed[key] = self.run(name, None, json_keys, *arguments)
        return self._of_deepspeed[key]


@pytest.fixture(scope="module")
def adopters(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Adopters:
    return Adopters(ranks, tmp_path_factory.mktemp("adopters"))


def assert_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.keys() == reference.keys()
        for key, value in reference.items():
            exact = key in EXACT
            assert mine[key] == (value if exact else pytest.approx(value, rel=1e-5)), key
    learned(theirs[0]["losses"], unless="the scripts draw other samples for every step")


ALL = ["1f1b", "bitpipe", "zb_h1", "zb_v", "bitpipe_zb", "interleaved", "chimera"]
WITH_ITERATORS = [name for name in ALL if name != "chimera"]  # it needs data of both pipes on one rank


@pytest.mark.parametrize("schedule", select(ALL, ["1f1b", "bitpipe"]))
def test_tutorial(adopters: Adopters, schedule: str) -> None:
    theirs = adopters.deepspeed("tutorial", ADAM)
    assert_equal(adopters.run("tutorial", schedule, ADAM), theirs)


SPLITS = {4: [3, 5, 7], 8: [2, 3, 4, 5, 6, 7, 8]}


@pytest.mark.parametrize(
    ("schedule", "reentrant"),
    select(
        [(name, reentrant) for name in WITH_ITERATORS for reentrant in (False, True)],
        [("1f1b", True), ("bitpipe", False), ("bitpipe_zb", True)],
    ),
)
def test_diffusion_pipe(adopters: Adopters, schedule: str, reentrant: bool) -> None:
    stages = 4 if schedule in ("1f1b", "zb_h1") else 8
    theirs = adopters.deepspeed("diffusion_pipe", {}, "CONFIG", SPLITS[4], reentrant)
    assert_equal(adopters.run("diffusion_pipe", schedule, {}, "CONFIG", SPLITS[stages], reentrant), theirs)


@pytest.mark.parametrize("schedule", select(WITH_ITERATORS, ["1f1b", "bitpipe"]))
def test_qlora_pipe(adopters: Adopters, schedule: str) -> None:
    theirs = adopters.deepspeed("qlora_pipe", {}, "CONFIG", "FOLDER")
    assert_equal(adopters.run("qlora_pipe", schedule, {}, "CONFIG", "FOLDER"), theirs)


@pytest.mark.parametrize("schedule", select(WITH_ITERATORS, ["1f1b", "bitpipe"]))
def test_gpt_neox(adopters: Adopters, schedule: str) -> None:
    theirs = adopters.deepspeed("gpt_neox", ZERO, "CONFIG", "FOLDER")
    assert_equal(adopters.run("gpt_neox", schedule, ZERO, "CONFIG", "FOLDER"), theirs)
