"""The loop that both training scripts share: train, evaluate, save, resume, and say what came of it."""

from __future__ import annotations

import argparse
import gc
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..config.job import AUTO
from ..data.blend import parse_data_path
from ..data.datasets import parse_split
from ..engine import PipelineEngine
from ..engine.batches import MicroBatches
from ..errors import CheckpointError
from ..launch.process import EXIT_FAILED, rank, world_size
from ..models.bert import BertLoss
from ..models.config import TransformerConfig
from ..models.hf_config import unseen_in_weights
from ..observe.metrics import MetricsFile, StepMetrics, peak_memory_bytes
from ..pipe_schedules.files import is_timetable_file
from ..planner.job_plan import JobPlan

EXIT_NOT_SAVED = 3
EXIT_PIPE = 141  # a shell's code for a program that SIGPIPE ended


def say(text: str) -> None:
    """Print on rank 0, at once."""
    if rank() == 0:
        # With its end in one piece: launchers run Python unbuffered, and another process would speak in between.
        print(f"{text}\n", end="", flush=True)


def say_error(text: str) -> None:
    """Print on rank 0's standard error, at once."""
    if rank() == 0:
        print(f"error: {text}\n", end="", file=sys.stderr, flush=True)


def show(text: str) -> int:
    """``say()`` to a reader who may leave before the end (``| head -1``). Returns the exit code."""
    try:
        say(text)
    except BrokenPipeError:
        return EXIT_PIPE
    return 0


@dataclass
class Trainer:
    """Runs an engine up to step ``args.train_iters``.

    Args:
        engine: from :func:`ds_ext.initialize`.
        args: parsed flags of the script.
        plan: what was decided from the JSON.
        train, valid: micro-batches by id; ``valid`` may be None.
        tokens_per_sample: for tokens/s.
        tokenizer: fingerprint of the data's tokenizer; a checkpoint made with another one is refused.
        floor: (name, loss in nats) that a model which has learnt something is below.
        model: sizes of the model; a checkpoint holds those that its weights do not tell.
    """

    engine: PipelineEngine
    args: argparse.Namespace
    plan: JobPlan
    train: MicroBatches
    valid: MicroBatches | None
    tokens_per_sample: int
    floor: tuple[str, float] | None = None
    tokenizer: str | None = None
    model: TransformerConfig | None = None
    validation_loss: float | None = None
    not_saved: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Train to the last step; evaluate and save at intervals and at the end.

        Returns:
            The exit code: 0, EXIT_NOT_SAVED when a checkpoint could not be written, 1 when the last loss is not finite.
        """
        args = self.args
        if args.save:
            self.engine.try_checkpoint_folder(args.save)
        step = done = self.resume()
        if step >= args.train_iters:
            say(
                f"nothing to train: the checkpoint is at step {step} and --train-iters is {args.train_iters}."
            )
            return 0
        # What the set-up made stays; looking it through for cycles takes one rank 0.1 s while all others wait.
        gc.collect()
        gc.freeze()
        loss = math.nan
        with MetricsFile(args.metrics_file if rank() == 0 else None) as file:
            while step < args.train_iters:
                step += 1
                metrics = self.step(step)
                loss = metrics.loss
                file.write(metrics)
                last = step == args.train_iters
                if last or step == done + 1 or step % args.log_interval == 0:
                    say(metrics.line(args.train_iters))
                if last or _due(step, args.eval_interval):
                    self.evaluate(step)
                if args.save and (last or _due(step, args.save_interval)):
                    self.save(step, loss)
        self.say_goodbye(loss)
        return self.exit_code(loss)

    def step(self, step: int) -> StepMetrics:
        """One optimizer step and what it cost."""
        engine = self.engine
        lr = float(engine.get_lr()[0])
        started = time.perf_counter()
        loss = float(engine.train_batch(self.train))
        seconds = time.perf_counter() - started
        norm = engine.get_global_grad_norm()
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=None if norm is None else float(norm),
            lr=lr,
            iter_time_s=seconds,
            tokens_per_s=engine.train_batch_size() * self.tokens_per_sample / seconds,
            consumed_samples=self.train.consumed_samples,
            schedule=self.plan.timetable.schedule,
            transport=engine.transport.name,
            peak_memory_bytes=peak_memory_bytes(engine.device),
            bubble_measured=engine.bubble_measured,
            bubble_simulated=engine.bubble_simulated,
        )

    def evaluate(self, step: int) -> None:
        """Mean loss over ``--eval-iters`` steps of the validation split, always the same samples.

        The perplexity is that of words: of BERT's two losses, the masked words' alone.
        """
        if self.valid is None:
            return
        self.valid.consumed_samples = 0
        loss_fn = self.engine.module.loss_fn
        if isinstance(loss_fn, BertLoss):
            loss_fn.reset()
        losses = [float(self.engine.eval_batch(self.valid)) for _ in range(self.args.eval_iters)]
        loss = sum(losses) / len(losses)
        self.validation_loss = loss
        words, listed = loss, ""
        if isinstance(loss_fn, BertLoss):
            words, order = loss_fn.mean_parts(self.engine.device)
            listed = f" (masked words {words:.4f}, sentence order {order:.4f})" if loss_fn.has_order else ""
        say(f"step {step}: validation loss {loss:.4f}{listed}, perplexity {_perplexity(words)}")

    def save(self, step: int, loss: float) -> None:
        """Write a checkpoint with the position in the data; training goes on when that fails."""
        watch = self.engine.loss_watch
        if watch.in_a_row and not math.isfinite(loss):
            self.not_saved.append(step)
            say_error(f"step {step}: no checkpoint saved, as the loss is {loss}. The last one stays current.")
            return
        state = {
            "step": step,
            "tokenizer": self.tokenizer,
            "data_path": list(self.args.data_path),
            "data_flags": data_flags(self.args),
            "model": None if self.model is None else unseen_in_weights(self.model),
            "sizes": self._sizes(),
            **self.train.state_dict(),
        }
        try:
            self.engine.save_checkpoint(self.args.save, tag=f"step_{step}", client_state=state)
        except CheckpointError as error:  # on every rank
            self.not_saved.append(step)
            say_error(f"step {step}: {error} Training goes on.")
        else:
            say(f"step {step}: saved {Path(self.args.save) / f'step_{step}'}")

    def resume(self) -> int:
        """Load ``--load`` if given. Returns the number of steps done."""
        if not self.args.load:
            return 0
        path, state = self.engine.load_checkpoint(self.args.load)
        if path is None or state is None or "step" not in state or "consumed_samples" not in state:
            raise CheckpointError(
                f"{path or self.args.load} holds no step and position in the data: it was saved by another script. "
                f"Write an older one's name into {Path(self.args.load) / 'latest'}, or leave --load out."
            )
        if state.get("tokenizer") not in (None, self.tokenizer):
            raise CheckpointError(
                f"{path} was trained on data of another tokenizer (fingerprint {state['tokenizer']}; the "
                f"data's is {self.tokenizer}). Give the --data-path of that run, or another --load."
            )
        self._check_model(path, state.get("model"))
        self.train.load_state_dict(state)
        other = "" if state.get("sizes") == self._sizes() else f" (written with {state.get('sizes')})"
        say(
            f"resumed from {path} at step {state['step']}, {self.train.consumed_samples} samples consumed{other}"
        )
        for line in changed_data(state.get("data_flags") or {}, data_flags(self.args)):
            say(line)
        return int(state["step"])

    def _check_model(self, path: str, saved: Mapping[str, Any] | None) -> None:
        """What the weights' shapes do not tell must be as it was: with other heads they mean something else."""
        if self.model is None or not saved:
            return
        ours = unseen_in_weights(self.model)
        for key in ("num_attention_heads", "layernorm_epsilon"):
            if saved[key] != ours[key]:
                raise CheckpointError(
                    f"{path} is of a model with {key} {saved[key]}; this one has {ours[key]}. Give the model the sizes "
                    f"of that run."
                )

    def _sizes(self) -> str:
        layout = self.plan.layout
        sizes = layout.placement.devices_per_pipe, layout.tensor_parallel_size, layout.data_parallel_size
        return "{}, PP {} x TP {} x DP {}".format(self.plan.timetable.schedule, *sizes)

    def say_goodbye(self, loss: float) -> None:
        """The result in one line, and what to run next."""
        if self.floor is not None:
            name, value = self.floor
            kind, loss = (
                ("final", loss) if self.validation_loss is None else ("validation", self.validation_loss)
            )
            verdict = "below" if loss < value else "not below"
            say(f"{kind} loss {loss:.4f}, {verdict} the {name} of {value:.4f} nats")
        lines = [f"see the order  {shlex.join(['python', '-m', 'ds_ext', 'show', *self._shown_by()])}"]
        if self.args.save:
            lines.insert(0, f"train on       {resume_command(sys.argv, self.args)}")
        say("next: " + "\n      ".join(lines))

    def exit_code(self, loss: float) -> int:
        """Return 0 when the last loss is finite and every checkpoint was saved; report the rest on standard error."""
        if not math.isfinite(loss):
            say_error(f"the last loss is {loss} (exit code {EXIT_FAILED}).")
            return EXIT_FAILED
        if self.not_saved:
            say_error(
                f"checkpoints not saved: step {', '.join(map(str, self.not_saved))} (exit code {EXIT_NOT_SAVED})."
            )
            return EXIT_NOT_SAVED
        return 0

    def _shown_by(self) -> list[str]:
        """What the verb ``show`` needs to draw the order that was run."""
        table, settings = self.plan.timetable, self.plan.job.ds_ext
        if is_timetable_file(settings.schedule):
            return [settings.schedule]
        words = [
            table.schedule,
            "--stages",
            str(table.placement.devices_per_pipe),
            "--micro-batches",
            str(table.micro_batches),
        ]
        if settings.schedule == AUTO:
            return words
        options = self.plan.options
        return words + [word for key, value in options.items() for word in ("--option", f"{key}={value}")]


# What a resumed run must know of a flag that decides which samples there are, and in which order.
_DATA_FLAGS = {
    "data_path": "unless it is the same data, the samples consumed are passed over in data not seen yet",
    "split": "the documents are shared out anew: what is validation data now may have been trained on, so the "
    "validation loss may be too low",
    "seq_length": "samples of another length, in another order: some are seen again, others not at all in this epoch",
    "seed": "another order of the samples: some are seen again, others not at all in this epoch",
    "mask_prob": "another share of the tokens is to be predicted: losses cannot be compared with those before",
    "short_seq_prob": "other samples, in another order: some are seen again, others not at all in this epoch",
}


def data_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that decide the samples and their order, of those that the script has, each in one way of writing it.

    Paths are absolute; the shares of a split, and the weights of a blend, add up to 1.
    """
    found = {name: getattr(args, name) for name in _DATA_FLAGS if hasattr(args, name)}
    if "split" in found:
        found["split"] = ",".join(f"{share:.6g}" for share in parse_split(found["split"]))
    if "data_path" in found:
        weights, prefixes = parse_data_path(found["data_path"])
        paths = [str(path.absolute()) for path in prefixes]
        shares = [f"{float(weight / sum(weights)):.6g}" for weight in weights]
        pairs = [word for pair in zip(shares, paths, strict=True) for word in pair]
        found["data_path"] = " ".join(pairs if len(paths) > 1 else paths)
    return found


def changed_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each data flag that a resumed run has changed: what it was, is, and means.

    Args:
        before, now: from :func:`data_flags`; flags that only one of them has are passed over.
    """
    return [
        f"note: --{name.replace('_', '-')} was {before[name]}, is {now[name]}: {meaning}"
        for name, meaning in _DATA_FLAGS.items()
        if name in before and name in now and before[name] != now[name]
    ]


def resume_command(argv: Sequence[str], args: argparse.Namespace) -> str:
    """The command that trains on from ``args.save`` for as many steps again, with the flags of this run."""
    words, dropped = list(argv), ("--load", "--train-iters", "--local_rank", "--local-rank")
    kept: list[str] = []
    while words:
        word = words.pop(0)
        if word in dropped:
            words = words[1:]
        elif word.partition("=")[0] not in dropped:
            kept.append(word)
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    launcher = ["torchrun", "--nproc_per_node"] if torchrun else ["deepspeed", "--num_gpus"]
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or str(world_size())
    return shlex.join(
        [*launcher, ranks, *kept, "--load", args.save, "--train-iters", str(2 * args.train_iters)]
    )


def shut_down(engine: PipelineEngine) -> None:
    """Wait for every message and every rank, so that no rank leaves while another still needs it."""
    if engine.tracer is not None:
        engine.tracer.finish()
    engine.transport.close()
    dist.barrier()


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.1f}" if loss < 100 else "huge"
