"""Real launches: a job started by `deepspeed` or `torchrun`, watched from outside, and what is left of it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MARKER = "DS_EXT_TEST_JOB"
BIN = Path(sys.executable).parent
REDUCED_HOST = ROOT / "tests" / "reduced_host"
LAUNCHERS = ("deepspeed", "torchrun")
WORDS = ["the", "pipe", "takes", "a", "batch", "and", "hands", "it", "on", "until", "all", "is", "through"]


def environment(**extra: str) -> dict[str, str]:
    """The caller's environment without what a launcher sets, one thread a rank.

    ``DS_EXT_TEST_WITHOUT="fp16"`` hides a precision from the processes; see tests/reduced_host.
    """
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    kept.update(
        PATH=f"{BIN}:{kept['PATH']}",
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
        PYTHONPATH=f"{ROOT}{os.pathsep}{REDUCED_HOST}",
        **extra,
    )
    return kept


def command(launcher: str, ranks: int, port: int, *script: str) -> list[str]:
    """The command line that starts ``script`` on ``ranks`` local ranks."""
    if launcher == "deepspeed":
        return ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(port), *script]
    return ["torchrun", "--nproc_per_node", str(ranks), "--master_port", str(port), *script]


def processes(mark: str) -> dict[int, dict[str, str]]:
    """Environment by process id of every living process that carries the mark; zombies are dead."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARKER}={mark}" in words and state not in "ZX":
            found[int(folder.name)] = dict(word.split("=", 1) for word in words if "=" in word)
    return found


def find_free_port() -> int:
    """Return a free port below the ephemeral range, from which the system takes ports of other connections."""
    try:
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first_ephemeral = 32768
    ports = range(10_000, first_ephemeral) if first_ephemeral > 11_000 else range(60_000, 65_000)
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.SystemRandom().choice(ports)
            probe.bind(("", port))
            return port


def without_gloo(text: str) -> str:
    """Return an output without the lines that torch 2.9 prints for every process group; those of ranks may mix."""
    return re.sub(r"(?m)^.*(\[Gloo\] Rank|connected peer ranks is).*\n", "", text)


class Job:
    """A launched job in a process group of its own; its output is collected with the time of each line."""

    def __init__(self, words: list[str], cwd: Path, **env: str) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            words,
            cwd=cwd,
            env=environment(**{MARKER: self.mark}, **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            # As from a terminal, also when the tests themselves run in the background, where SIGINT is ignored.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave nothing behind, whatever the test found."""
        for process in processes(self.mark):
            os.kill(process, signal.SIGKILL)
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        is_gloo = False
        for line in self.process.stdout:
            is_gloo = without_gloo(line) != line or (is_gloo and not line.strip())
            if not is_gloo:
                self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, words: str, timeout_s: float = 600) -> None:
        """Until a line has ``words`` in it."""
        deadline = time.monotonic() + timeout_s
        while not any(words in line for line in list(self.lines)):
            assert time.monotonic() < deadline and self.process.poll() is None, (
                f"no {words!r} in:\n{self.text}"
            )
            time.sleep(0.05)

    def ranks(self) -> dict[int, int]:
        """Process id by rank."""
        launched = {int(env["RANK"]): pid for pid, env in processes(self.mark).items() if "RANK" in env}
        return dict(sorted(launched.items()))

    def wait(self, timeout_s: float) -> int:
        """The launcher's exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def seconds_until_gone(self, limit_s: float, but: tuple[int, ...] = ()) -> float:
        """How long it takes from now until no process of the job (except ``but``) is alive."""
        started = time.monotonic()
        # A process that is just executing another program has no readable environment, and so no mark.
        while set(processes(self.mark)) - set(but) or (
            self.process.pid not in but and self.process.poll() is None
        ):
            waited = time.monotonic() - started
            assert waited < limit_s, (
                f"{processes(self.mark).keys()} still alive after {waited:.0f} s:\n{self.text}"
            )
            time.sleep(0.05)
        return time.monotonic() - started

    def first(self, *words: str) -> int:
        """Number of the first line that has one of ``words``."""
        for number, line in enumerate(self.lines):
            if any(word in line for word in words):
                return number
        raise AssertionError(f"none of {words} in:\n{self.text}")


def tiny_config(data: Path, **ds_ext: Any) -> dict[str, Any]:
    """A GPT of a few thousand parameters that trains in milliseconds a step."""
    train = {
        "num_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 16,
        "data_path": str(data),
        "train_iters": 3,
        "eval_iters": 1,
        "split": "80,20,0",
    }
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "ds_ext": {"schedule": "bitpipe", "pipeline_parallel_size": 2, **ds_ext, "train": train},
    }


def write_json(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(json.dumps(config, indent=1))
    return path


def prepare_corpus(folder: Path, files: int = 40) -> Path:
    """Write a small text of about 400 tokens a file below ``folder`` and return the folder of its prepared data."""
    text = folder / "text"
    text.mkdir()
    for number in range(files):
        order = [WORDS[(number * 7 + i * (1 + number % 5)) % len(WORDS)] for i in range(400)]
        (text / f"{number:02}.txt").write_text(" ".join(order) + "\n")
    made = folder / "data"
    verb = [
        sys.executable,
        "-m",
        "ds_ext",
        "prepare",
        "--source",
        str(text),
        "--output",
        str(made),
        "--vocab-size",
        "300",
    ]
    subprocess.run(verb, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True)
    return made


def prepare_bert_corpus(folder: Path) -> Path:
    """Write small sentences below ``folder`` and return the folder of their prepared data."""
    text, output = folder / "text", folder / "bert"
    text.mkdir()
    for number in range(30):
        sentences = [
            " ".join(WORDS[(number * 7 + i * place) % len(WORDS)] for place in range(9)).capitalize() + "."
            for i in range(40)
        ]
        (text / f"{number:02}.txt").write_text("\n".join(sentences) + "\n")
    verb = [sys.executable, "-m", "ds_ext", "prepare", "--source", str(text), "--output", str(output)]
    words = [*verb, "--tokenizer-type", "wordpiece", "--vocab-size", "90"]
    done = subprocess.run(words, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True)
    printed = " ".join(done.stdout.replace("\\\n", "").split())
    assert f"train_bert.py --deepspeed_config configs/bert_bitpipe.json --data-path {output}" in printed
    return output
