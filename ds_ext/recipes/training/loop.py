"""Training loop of the scripts: train, evaluate, save, resume, report."""

from __future__ import annotations

import argparse
import gc
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...config.deepspeed_json import value_at
from ...config.job import AUTO
from ...engine import PipelineEngine
from ...engine.all_ranks import on_all_ranks
from ...engine.batches import MicroBatches
from ...engine.checkpoint.folder import current_tag
from ...environment import process_age_s, rank
from ...errors import CheckpointError, ConfigError
from ...hf.folder import read_config, stored_dtype
from ...hf.routers import AUXILIARY_LOSS
from ...launch import failure, process, stop
from ...launch.launcher import launch_again
from ...model.config import TransformerConfig
from ...observe.metrics import Metrics
from ...observe.progress import print_line
from ...pipe_schedules.files import is_timetable_file
from ...planner.job_plan import JobPlan
from ..convert.tokenizer_files import ORIGIN, origin_of
from ..models.bert import MASKED_WORDS
from ..models.hf_config import unseen_in_weights
from .data_flags import changed_data, data_flags

EXIT_NOT_SAVED = 3
EXIT_PIPE = 141  # a shell's exit code for a program that SIGPIPE ended


def say(text: str) -> None:
    if rank() == 0:
        print_line(text)


def say_error(text: str) -> None:
    if rank() == 0:
        print(f"error: {text}\n", end="", file=sys.stderr, flush=True)


def show(text: str) -> int:
    """Print on rank 0 and return the exit code, even if the reader closes the pipe (``| head -1``)."""
    try:
        say(text)
    except BrokenPipeError:
        return EXIT_PIPE
    return 0


@dataclass
class Trainer:
    """Loop up to step ``args.train_iters``.

    Args:
        model: sizes of the model; a checkpoint stores those that its weights do not show.
        train, valid: micro-batches by id; None: no evaluation.
        floor: name and value (in nats) of a baseline loss; a model with a lower loss uses context.
        tokenizer: fingerprint of the data's tokenizer, saved with a checkpoint.
        samples_per_epoch: training samples of one pass over the data; None: unknown.
    """

    engine: PipelineEngine
    args: argparse.Namespace
    plan: JobPlan
    model: TransformerConfig
    train: MicroBatches
    valid: MicroBatches | None
    floor: tuple[str, float] | None = None
    tokenizer: str | None = None
    samples_per_epoch: int | None = None
    validation_loss: float | None = None
    lowest: tuple[float, int] | None = None  # validation loss, and its step
    stopped: str = ""  # why the run ended before its last step
    not_saved: list[int] = field(default_factory=list)
    metrics: Metrics = field(init=False)
    # What a checkpoint keeps of the folder of --hf-model.
    _origin: dict[str, Any] = field(default_factory=dict)
    _saving: int | None = None  # step of the last save, until all ranks know its result
    _announced: int | None = None  # step of the last save whose end rank 0 has printed early

    def run(self) -> int:
        """Train to the last step or a request to stop, and return the exit code.

        It is 0, EXIT_NOT_SAVED if a checkpoint could not be written, or 1 if the last loss is not finite.
        """
        args = self.args
        self._listen()
        self._origin = origin_of(getattr(args, "hf_model", None), args.tokenizer)
        first = step = self.recover()
        if args.save:
            steps = [n for n in range(step + 1, args.train_iters) if _is_due(n, args.save_interval)]
            self.engine.try_checkpoint_folder(args.save, [f"step_{n}" for n in (*steps, args.train_iters)])
        if step >= args.train_iters:
            say(f"nothing to train: checkpoint at step {step}, --train-iters {args.train_iters}")
            return 0
        # The objects from set-up stay alive. Scanning them takes one rank 0.1 s, while all others wait.
        gc.collect()
        gc.freeze()
        loss = None
        metrics = self._metrics()
        failure.advice = self.next_command
        self._agree_on_stop()  # on requests since the start of the processes
        startup_s = self._set_deadline()
        while step < args.train_iters and not self.stopped:
            step += 1
            loss = float(self.engine.train_batch(self.train))
            is_last = step == args.train_iters
            is_due = self.valid is not None and (is_last or _is_due(step, args.eval_interval))
            evaluates = is_due and (is_last or self.engine.stops.agreed is None)
            validation = self.evaluate(self.valid, step) if self.valid is not None and evaluates else None
            if validation is None:
                metrics.log(loss)
                if is_due:
                    say(f"step {step}: no validation loss, because {self.engine.stops.agreed}")
            else:
                valid_loss, parts = validation
                of_tokens = valid_loss - parts.get(AUXILIARY_LOSS, 0.0)
                note = f", perplexity {_perplexity(parts.get(MASKED_WORDS, of_tokens))}"
                metrics.log(loss, validation_loss=valid_loss, validation_losses=parts, validation_note=note)
            self.stopped = "" if is_last else self._stop_cause(step)
            self._announce_save()
            if args.save and (is_last or self.stopped or _is_due(step, args.save_interval)):
                self.save(step, loss)
                if not (is_last or self.stopped):
                    self._agree_on_stop()  # on requests during the save
        self.engine.wait_for_weights()  # other ranks gather this rank's part
        self.finish_save()
        agreed = self.engine.stops.agreed
        if agreed is not None and agreed.cause == stop.DEADLINE and step - first <= 1:
            limit_s = 60 * args.exit_duration_in_mins
            say(f"note: --exit-duration-in-mins: start-up took {startup_s:.0f} s of {limit_s:.0f} s")
        self.report_result(step, loss)
        return self.exit_code(loss)

    def _listen(self) -> None:
        """Take the signals of the flags as requests to stop, with those since the start of this process."""
        args, early = self.args, stop.listening
        if args.exit_signal is None and not args.exit_signal_handler:
            return
        if early is not None and not early.gathered:
            self.engine.stops = early
        signals = stop.DEFAULT_SIGNALS if args.exit_signal is None else [signal.Signals[args.exit_signal]]
        self.engine.stops.listen(signals)

    def _set_deadline(self) -> float:
        """Return the age of this process in seconds."""
        minutes, age_s = self.args.exit_duration_in_mins, process_age_s()
        if minutes is not None:
            self.engine.stops.deadline = time.monotonic() - age_s + 60 * minutes
        return age_s

    def _agree_on_stop(self) -> None:
        """Gather requests to stop outside of a step, if there can be any. All ranks call this together."""
        stops = self.engine.stops
        if stops.signals or stops.deadline is not None:
            stops.agree_on_stop(on_all_ranks(lambda: stops.cause))
            self.stopped = "" if stops.agreed is None else str(stops.agreed)

    def _stop_cause(self, step: int) -> str:
        """Return why the run ends after this step; the same on all ranks."""
        if _is_due(step, self.args.exit_interval):
            return f"--exit-interval {self.args.exit_interval}"
        stop = self.engine.stops.agreed
        return "" if stop is None else str(stop)

    def _metrics(self) -> Metrics:
        samples = self.args.train_iters * self.engine.train_batch_size()
        repeats = self.samples_per_epoch and samples > self.samples_per_epoch
        self.metrics = Metrics(
            self.engine,
            total_steps=self.args.train_iters,
            file=self.args.metrics_file,
            tokens_per_sample=self.model.seq_length,
            flops_per_sample=self.model.flops_per_sample,
            peak_tflops=self.args.peak_tflops,
            log_interval=self.args.log_interval,
            model=asdict(self.model),
            samples_per_epoch=self.samples_per_epoch if repeats else None,
        )
        return self.metrics

    def evaluate(self, valid: MicroBatches, step: int) -> tuple[float, dict[str, float]] | None:
        """Return the mean loss of ``--eval-iters`` validation steps, and its parts if there are any.

        Every evaluation uses the same samples. If the run may be stopped, each validation step is a separate
        evaluation. A request then ends them, and the result is None.
        """
        valid.consumed_samples = 0
        stops, steps = self.engine.stops, self.args.eval_iters
        pieces = steps if stops.signals or stops.deadline is not None else 1
        losses: list[float] = []
        parts: dict[str, float] = {}
        for _ in range(pieces):
            size = steps // pieces * self.engine.micro_batches
            losses.append(float(self.engine.eval_batch(valid, num_micro_batches=size)))
            for name, value in (self.engine.eval_additional_losses or {}).items():
                parts[name] = parts.get(name, 0.0) + float(value) / pieces
            if stops.agreed is not None and len(losses) < pieces:
                return None
        loss = self.validation_loss = math.fsum(losses) / pieces
        self.lowest = min(self.lowest or (loss, step), (loss, step))
        return loss, parts

    def save(self, step: int, loss: float) -> None:
        """Write a checkpoint with the position in the data, unless the last step left a non-finite loss.

        A failed or refused save adds ``step`` to ``not_saved``, and training continues.
        """
        self.finish_save()
        # The watch does not count steps that fp16 skips to lower its scale: they leave the weights as they are.
        if not math.isfinite(loss) and self.engine.loss_watch.in_a_row:
            self.not_saved.append(step)
            say_error(f"step {step}: checkpoint not saved: loss {loss}. The previous one stays current.")
            return
        state = {
            "step": step,
            "tokenizer": self.tokenizer,
            "data_path": list(self.args.data_path),
            "data_flags": data_flags(self.args),
            "model": unseen_in_weights(self.model),
            "lora_rank": self.model.lora_rank,
            **self._origin,
            "sizes": self._sizes(),
            **self.train.state_dict(),
        }
        settings = {"keep": self.args.keep_checkpoints, "background": self.args.async_save}
        settings["exclude_frozen_parameters"] = self.model.lora_rank is not None  # they are in --hf-model
        with self._reporting_failure(step):
            self.engine.save_checkpoint(self.args.save, tag=f"step_{step}", client_state=state, **settings)
            self._saving = step
            if self.engine.saving is None:
                self.finish_save()

    def finish_save(self) -> None:
        step, self._saving = self._saving, None
        if step is not None:
            with self._reporting_failure(step):
                is_announced = self._announced == step
                self.engine.wait_for_save()
                if not is_announced:
                    self._say_saved(step)

    def _announce_save(self) -> None:
        save, step = self.engine.saving, self._saving
        is_new = rank() == 0 and step != self._announced
        if is_new and step is not None and save and save.is_done() and not save.wait():
            self._announced = step
            self._say_saved(step)

    def _say_saved(self, step: int) -> None:
        say(f"step {step}: saved {Path(self.args.save) / f'step_{step}'}")

    @contextmanager
    def _reporting_failure(self, step: int) -> Iterator[None]:
        """Report a failed save; it ends the run only with ``--stop-if-not-saved``."""
        try:
            yield
        except CheckpointError as error:  # on every rank
            if self.args.stop_if_not_saved:
                raise
            self.not_saved.append(step)
            ends = self.stopped or step == self.args.train_iters
            say_error(f"step {step}: {error}{'' if ends else ' Training continues.'}")

    def recover(self) -> int:
        """Load the state to continue from, and return its step; 0 for a new run.

        ``--load`` is read first, because snapshots have no frozen weights. After a restart by the launcher, the
        snapshots in host memory replace it, or the last checkpoint of this run in ``--save`` if it is newer or no
        snapshot is left.
        """
        step = self.resume(self.args.load)
        recovered = self.engine.recover(self.train, self.args.save)
        if recovered is not None:
            return recovered.step
        load, save = self.args.load, self.args.save
        is_same_folder = load and save and os.path.realpath(load) == os.path.realpath(save)
        return self.resume(save, step) if self.engine.run.continues and not is_same_folder else step

    def resume(self, folder: str | None, default: int | None = None) -> int:
        """Load the current checkpoint of a folder, print what was resumed, and return its step; 0 without a folder.

        ``default`` is the step to return without a checkpoint of this run; None raises CheckpointError.
        """
        if not folder:
            return default or 0
        path, state = self.engine.load_checkpoint(folder)
        if path is None:
            if default is not None:
                return default
            raise CheckpointError(
                f"{folder}: no longer contains the checkpoint with which this run began. Start the job again."
            )
        if state is None or "step" not in state or "consumed_samples" not in state:
            raise CheckpointError(
                f"{path}: saved by another script (got no step or position in the data). Write the "
                f"name of an older checkpoint into {Path(folder) / 'latest'}, or remove --load."
            )
        self.train.load_state_dict(state)
        self._origin = {**{key: state[key] for key in ORIGIN if key in state}, **self._origin}
        writer = "" if state.get("sizes") == self._sizes() else f" (written with {state.get('sizes')})"
        say(
            f"resumed from {path} at step {state['step']}, {self.train.consumed_samples} samples consumed{writer}"
        )
        for line in changed_data(state.get("data_flags") or {}, data_flags(self.args)):
            say(line)
        return int(state["step"])

    def _sizes(self) -> str:
        layout = self.plan.layout
        sizes = f"PP {layout.placement.devices_per_pipe} x TP {layout.tensor_parallel_size}"
        return f"{self.plan.timetable.schedule}, {sizes} x DP {layout.data_parallel_size}"

    def report_result(self, step: int, loss: float | None) -> None:
        """Print why the run ended early or its loss (None: no step was made), and the commands to run next."""
        if self.stopped:
            lost = "" if self.args.save else " Nothing is saved: --save DIR is missing."
            when, lost = ("", lost) if loss is not None else (" before another step", " Nothing to save.")
            say(f"step {step}: stopped{when}, because {self.stopped}.{lost}")
        elif loss is not None:
            self._report_loss(step, loss)
        self.metrics.print_summary()
        lines = []
        if self.args.save:
            lines += self._resume_lines(self.args.save, self.args.train_iters * (1 if self.stopped else 2))
            if getattr(self.args, "hf_model", None):
                output = f"{self.args.save.rstrip('/')}_hf"
                output += f"_step_{step}" * os.path.lexists(output)  # of an earlier export
                words = [self.args.save, "--to", "hf", output]
                if stored_dtype(read_config(Path(self.args.hf_model))) == "bfloat16":
                    words += ["--dtype", "bfloat16"]
                if self.model.transformer_impl == "transformers":
                    words += ["--hf-model", self.args.hf_model]
                name = "merged model" if getattr(self.args, "lora_rank", None) else "for transformers"
                lines.append(f"{name:<20}{_verb('convert', *words)}")
        lines.append(f"show the timetable  {_verb('show', *self._show_arguments())}")
        say("next: " + "\n      ".join(lines))

    def _report_loss(self, step: int, loss: float) -> None:
        """Compare the loss with that of a model that knows only how often a token occurs.

        A pretrained model is below it from the start, so that only the opposite tells something.
        """
        kind, parts = "final loss", self.engine.agg_additional_losses
        if self.validation_loss is not None:
            kind, loss, parts = "validation loss", self.validation_loss, self.engine.eval_additional_losses
        if parts and AUXILIARY_LOSS in parts:
            kind, loss = f"{kind} without that of the routers", loss - float(parts[AUXILIARY_LOSS])
        name, floor = self.floor or ("", math.inf)
        is_pretrained = getattr(self.args, "hf_model", None) and not self.args.train_from_scratch
        if self.floor and (loss >= floor or not is_pretrained):
            verdict = "below" if loss < floor else "not below"
            advice = "" if loss < floor else ": train longer, or raise lr and min_lr"
            say(f"{kind} {loss:.4f}, {verdict} the {name} of {floor:.4f} nats{advice}")
        elif self.lowest is not None and self.lowest[1] < step:
            lowest, best = self.lowest
            say(f"validation loss {self.validation_loss:.4f}; the lowest was {lowest:.4f} after step {best}")

    def next_command(self) -> str:
        last = last_checkpoint(self.args.save, self.args.load)
        if last is None:
            return ""
        lines = self._resume_lines(str(last.parent), self.args.train_iters)
        return f"last checkpoint: {last}\nnext: " + "\n      ".join(lines)

    def _resume_lines(self, folder: str, total: int) -> list[str]:
        command, note = resume_command(sys.argv, folder, total)
        notes = [note] if note else []
        decay = int(value_at(self.plan.job.deepspeed, "scheduler.params.total_num_steps") or total)
        if total > decay:
            notes.append(f"its learning rate stays as it is after step {decay:,}, the end of the schedule")
        return [f"continue training   {command}", *[f"{'':20}({note})" for note in notes]]

    def exit_code(self, loss: float | None) -> int:
        if loss is not None and not math.isfinite(loss):
            say_error(f"last loss {loss} (exit code {process.EXIT_FAILED})")
            return process.EXIT_FAILED
        if self.not_saved:
            steps = ", ".join(map(str, self.not_saved))
            last = last_checkpoint(self.args.save, self.args.load)
            resumed = f"A resume continues from {last}" if last else "There is no checkpoint to resume from"
            say_error(f"checkpoints not saved: step {steps}. {resumed} (exit code {EXIT_NOT_SAVED}).")
            return EXIT_NOT_SAVED
        return 0

    def _show_arguments(self) -> list[str]:
        timetable = self.plan.timetable
        schedule = self.plan.job.ds_ext.schedule
        if is_timetable_file(schedule):
            return [schedule]
        words = [timetable.schedule, "--num-devices", str(timetable.placement.devices_per_pipe)]
        words += ["--micro-batches", str(timetable.micro_batches)]
        words += ["--sequence-slices", str(timetable.slices)] if timetable.slices > 1 else []
        words += ["--vocabulary-parallel-head"] if self.plan.schedule.divides_head else []
        if schedule != AUTO:
            for key, value in self.plan.options.items():
                words += ["--option", f"{key}={value}"]
        return words


def resume_command(argv: Sequence[str], save: str, total: int) -> tuple[str, str]:
    """Return the command that continues from the folder ``save`` up to step ``total``, and a note on its use."""
    replaced_flags = ("--load", "--train-iters", "--train-samples", "--local_rank", "--local-rank")
    command: list[str] = []
    words = iter(argv)
    for word in words:
        if word in replaced_flags:
            next(words, None)  # its value
        elif word.partition("=")[0] not in replaced_flags:
            command.append(word)
    return launch_again([*command, "--load", save, "--train-iters", str(total)])


def last_checkpoint(*folders: str | None) -> Path | None:
    for folder in filter(None, folders):
        with suppress(ConfigError):
            return Path(folder, current_tag(Path(folder)))
    return None


def shut_down(engine: PipelineEngine) -> None:
    """Wait for all messages and all ranks, so that no rank exits early."""
    if engine.tracer is not None:
        engine.tracer.finish()
    engine.transport.close()
    dist.barrier()


def _verb(name: str, *arguments: str) -> str:
    return shlex.join(["python", "-m", "ds_ext", name, *arguments])


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.1f}" if loss < 100 else "huge"
