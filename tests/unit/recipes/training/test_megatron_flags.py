"""Every flag of Megatron-LM and Megatron-DeepSpeed has a row, and launch scripts give a plan unchanged."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_ext.config.job import JobConfig
from ds_ext.errors import ConfigError
from ds_ext.parallel.partition import layer_boundaries
from ds_ext.planner.job_plan import JobPlan
from ds_ext.recipes.training.arguments import finished_json, parse
from ds_ext.recipes.training.megatron_flags import MEGATRON_FLAGS, Harmless, Refused, row_of
from ds_ext.recipes.training.script_flags import SCRIPTS, Model, by_spelling
from ds_ext.recipes.training.setup import model_fields
from tests.plans import plan_job

# Flags of BitPipe, MegaDPP, MegaFBD, the launchers and ds_ext.
OURS = {
    *("schedule", "enable_bitpipe_schedule", "use_dpp", "forward_backward_disaggregating", "node_ips"),
    *("ignore_forward_tensor_parallel", "workload", "transformer_pipeline_model_parallel_size", "rank_order"),
    *("sequence_slices", "vocabulary_parallel_head"),
    *("num_gpus", "nproc_per_node", "trace", "trace_dir", "trace_interval", "trace_granularity"),
}
LINES = [line.split() for line in Path(__file__).with_name("megatron_flags.txt").read_text().splitlines()[2:]]
NUMBERS = {flag: {int(n) if n.isdigit() else n for n in numbers.split("/")} for flag, _, numbers in LINES}
ENOUGH = ["--lr", "6e-4", "--micro-batch-size", "4", "--global-batch-size", "32"]


def own_flags() -> set[str]:
    return {flag for model in SCRIPTS for flag in by_spelling(model)}


def test_every_flag_has_a_row() -> None:
    assert len(NUMBERS) == len(LINES) > 950
    own, rows = own_flags(), {flag: row_of(flag) for flag in NUMBERS}
    assert [flag for flag, (_, row) in rows.items() if row is None and flag not in own] == []
    # A flag of a script has no second meaning.
    assert [
        flag for flag, (_, row) in rows.items() if isinstance(row, Harmless | Refused) and flag in own
    ] == []
    assert set(MEGATRON_FLAGS) - {key for key, _ in rows.values()} == OURS


def test_harmless_flags_take_as_many_values_as_in_megatron() -> None:
    for flag, numbers in NUMBERS.items():
        row = row_of(flag)[1]
        if isinstance(row, Harmless):
            assert row.nargs == ("?" if numbers == {0, 1} else numbers.pop()), flag


def test_replacements_are_flags_of_a_script() -> None:
    own = own_flags()
    for key, row in MEGATRON_FLAGS.items():
        if isinstance(row, Harmless | Refused):
            assert "--" + key.replace("_", "-") not in own, key
            reason = "" if isinstance(row, Harmless) else row.reason
            assert isinstance(row, Harmless) or bool(row.use) != bool(reason), key
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", row.use + reason)) <= own, key
        else:
            assert "--" + key.replace("_", "-") in own, key


# --- harmless flags -------------------------------------------------------------------------------------------------

HARMLESS = (
    "--data-impl mmap --num-workers 2 --use-flash-attn-v2 --log-timers-to-tensorboard --profile-ranks 0 3"
)


def problems(*words: str, model: Model = "gpt") -> list[str]:
    """Return the flags, or keys, of the lines of the error."""
    with pytest.raises(ConfigError) as error:
        parse(SCRIPTS[model], words, model)
    return [line.partition(":")[0] for line in str(error.value).splitlines()]


def test_harmless_flags_are_listed_and_change_nothing() -> None:
    words = [*ENOUGH, *HARMLESS.split(), "--overlap-grad-reduce", "--num-workers=2"]
    args, job = parse("train_gpt.py", words)
    (line,) = args.notes
    flags = ["--data-impl mmap", "--num-workers 2", "--use-flash-attn-v2", "--log-timers-to-tensorboard"]
    flags += ["--profile-ranks 0 3", "--overlap-grad-reduce"]
    assert re.findall(r"^ignored +(.*) \(.*\)$", line) == [", ".join(flags)]
    plain_args, plain_job = parse("train_gpt.py", ENOUGH)
    assert job.deepspeed == plain_job.deepspeed and plain_args.notes == []
    assert {**vars(args), "notes": None} == {**vars(plain_args), "notes": None}
    assert "train" not in finished_json("train_gpt.py", words, "gpt", args, job)["ds_ext"]


def test_harmless_keys_of_train_are_listed_and_not_written(tmp_path: Path) -> None:
    train = {"num_workers": 2, "overlap_grad_reduce": True, "manual_gc": False, "num_layers": 4}
    job = write_job(tmp_path, {"ds_ext": {"train": train}})
    args, parsed = parse("train_gpt.py", [*job, *ENOUGH])
    assert (
        args.notes == parse("train_gpt.py", [*ENOUGH, "--num-workers", "2", "--overlap-grad-reduce"])[0].notes
    )
    written = finished_json("train_gpt.py", [*job, *ENOUGH], "gpt", args, parsed)
    assert written["ds_ext"]["train"] == {"num_layers": 4}
    for key, value in (
        ("data_impl", "lazy"),
        ("moe_expert_capacity_factor", 2),
        ("context_parallel_size", 2),
    ):
        job = write_job(tmp_path, {"ds_ext": {"train": {key: value}}})
        with pytest.raises(ConfigError, match=key.replace("_", "[-_]")):
            parse("train_gpt.py", [*job, *ENOUGH])


@pytest.mark.parametrize(
    ("harmless", "other"),
    [
        ("--data-impl infer", "--data-impl lazy"),
        ("--dataloader-type single", "--dataloader-type cyclic"),
        ("--distributed-backend gloo", "--distributed-backend mpi"),
        ("--DDP-impl torch", "--DDP-impl FSDP"),
        ("--context-parallel-size 1", "--context-parallel-size 2"),
        ("--recompute-method uniform", "--recompute-method block"),
        ("--recompute-num-layers 1", "--recompute-num-layers 2"),
        ("--main-grads-dtype fp32", "--main-grads-dtype bf16"),
        ("--recompute-modules core_attn", "--recompute-modules core_attn mlp"),
        ("--accumulate-allreduce-grads-in-fp32 --bf16", "--accumulate-allreduce-grads-in-fp32 --fp16"),
        ("--no-position-embedding --position-embedding-type rope", "--no-position-embedding"),
        ("--no-pipeline-parallel", "--no-pipeline-parallel --pipeline-model-parallel-size 2"),
    ],
)
def test_the_value_decides(harmless: str, other: str) -> None:
    assert len(parse("train_gpt.py", [*ENOUGH, *harmless.split()])[0].notes) == 1
    assert problems(*ENOUGH, *other.split()) == [other.split()[0]]


def test_no_advice_changes_the_job() -> None:
    """difflib proposes similar flags only for words that are no flag of Megatron."""
    names = "rampup-batch-size kill-switch-file apply-layernorm-1p num-experts-teacher train-tokens "
    names += "lr-decay-tokens zero-stages finetune"
    with pytest.raises(ConfigError) as error:
        parse("train_gpt.py", [*ENOUGH, *(word for name in names.split() for word in (f"--{name}", "1"))])
    lines = dict(line.removeprefix("--").split(": ", 1) for line in str(error.value).splitlines())
    assert [*lines] == names.split()
    assert [name for name, text in lines.items() if "Did you mean" in text] == ["zero-stages"]
    assert "--train-samples" in lines["train-tokens"] and "--lr-decay-samples" in lines["lr-decay-tokens"]


def test_all_problems_are_in_one_error(tmp_path: Path) -> None:
    job = write_job(tmp_path, {"train_batch_size": 8, "gradient_clipping": 2.0})
    words = "--num-layers four --optimizer muon --moe-expert-capacity-factor 2 --seqlength 8 --lr 0.1 --data-impl lazy "
    words += "--clip-grad 1 --global-batch-size 16 --lr-decay-iters 3 --lr-decay-samples 8 "
    words += "--initial-loss-scale 3 --seed"
    flags = [line.split(" ")[0] for line in problems(*job, *words.split())]
    assert sorted(flags) == sorted(
        [
            *("--num-layers", "--optimizer", "--seed", "--seqlength", "--clip-grad", "--data-impl"),
            *(
                "--moe-expert-capacity-factor",
                "--global-batch-size",
                "--lr-decay-iters,",
                "--initial-loss-scale",
            ),
        ]
    )
    # A wrong value is not missing too.
    assert problems("--lr", "0.1", "--micro-batch-size", "two") == ["--micro-batch-size"]
    assert problems("--seed", "x", "--bf16=1", "--num-layers", "2") == [
        *("--seed", "--bf16", "--deepspeed_config")
    ]


def test_a_flag_of_the_other_script() -> None:
    assert problems(*ENOUGH, "--mask-prob", "0.1") == ["--mask-prob"]
    assert problems(*ENOUGH, "--swiglu", "--rotary-base", "1", model="bert") == ["--swiglu", "--rotary-base"]


# --- translated flags -----------------------------------------------------------------------------------------------


def write_job(folder: Path, config: dict[str, Any]) -> list[str]:
    path = folder / "job.json"
    path.write_text(json.dumps(config))
    return ["--deepspeed_config", str(path)]


def args_of(*words: str) -> argparse.Namespace:
    return parse("train_gpt.py", [*ENOUGH, *words])[0]


def json_of(*words: str) -> dict[str, Any]:
    return parse("train_gpt.py", [*ENOUGH, *words])[1].deepspeed


def test_other_names_and_spellings() -> None:
    args = args_of(
        *("--normalization", "rmsnorm", "--checkpoint-activations", "--use-rotary-position-embeddings"),
        *(
            "--rotary-position-embeddings-theta",
            "5e5",
            "--layernorm-epsilon",
            "1e-6",
            "--num-key-value-heads",
            "2",
        ),
        *("--persistent-save-interval", "7", "--save", "x", "--no-pad-vocab-size", "--split", "'99,1,0'"),
    )
    assert (args.normalization, args.recompute_granularity, args.position_embedding_type) == (
        *("RMSNorm", "full", "rope"),
    )
    assert (args.rotary_base, args.norm_epsilon, args.num_query_groups) == (5e5, 1e-6, 2)
    assert args.group_query_attention and (args.save_interval, args.make_vocab_size_divisible_by) == (7, 1)
    from ds_ext.recipes.data.blend import parse_split

    assert parse_split(args.split) == (0.99, 0.01, 0.0)
    assert args_of("--encoder-num-layers", "6", "--encoder-seq-length", "64").num_layers == 6


def test_train_samples(tmp_path: Path) -> None:
    words = ["--train-samples", "3300", "--lr-decay-samples", "1600"]
    args, job = parse("train_gpt.py", [*ENOUGH, *words])
    assert args.train_iters == 103 and job.deepspeed["scheduler"]["params"]["total_num_steps"] == 50
    assert json_of("--train-samples", "3300")["scheduler"]["params"]["total_num_steps"] == 103
    assert finished_json("train_gpt.py", [*ENOUGH, *words], "gpt", args, job)["ds_ext"]["train"] == {
        "train_iters": 103
    }
    assert problems(*ENOUGH[:4], "--train-samples", "3300") == ["--train-samples"]
    assert problems(*ENOUGH, "--train-samples", "3300", "--train-iters", "5") == [
        "--train-iters, --train-samples"
    ]
    in_train = write_job(tmp_path, {"ds_ext": {"train": {"train_samples": 320}}})
    assert parse("train_gpt.py", [*in_train, *ENOUGH])[0].train_iters == 10
    assert parse("train_gpt.py", [*in_train, *ENOUGH, "--train-iters", "7"])[0].train_iters == 7


def test_sections() -> None:
    assert json_of("--zero-stage", "0")["zero_optimization"] == {"stage": 0}
    assert json_of("--zero-stage", "1")["zero_optimization"] == {"stage": 1}
    assert json_of("--enable-zbh1-pipeline", "--enable-zbh1-exact-semantics")["ds_ext"] == {
        "schedule": "zb_h1"
    }
    assert problems(*ENOUGH, "--zero-stage", "2") == ["--zero-stage"]
    assert json_of("--distributed-timeout-minutes", "30")["ds_ext"]["transport_options"] == {
        "timeout_s": 1800
    }
    words = ["--wandb-project", "p", "--wandb-entity", "e", "--wandb-exp-name", "n"]
    assert json_of(*words)["wandb"] == {"team": "e", "enabled": True, "project": "p"}
    assert args_of(*words).wandb_exp_name == "n" and args_of(*words).notes == []
    assert "wandb" not in json_of("--wandb-project", "")


def test_stages_per_device() -> None:
    def section(*flags: str) -> dict[str, Any]:
        words = ["--num-layers", "32", "--pipeline-model-parallel-size", "4", *flags]
        return json_of(*words)["ds_ext"]

    layers, stages = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    for flags in ((layers, "2"), (stages, "4")):
        assert section(*flags) == {
            **{"pipeline_parallel_size": 4, "schedule": "interleaved", "schedule_options": {"chunks": 4}}
        }
    # As in Megatron, one stage per device is 1F1B.
    for flags in ((layers, "8"), (stages, "1")):
        assert section(*flags) == {"pipeline_parallel_size": 4}
    dpp = section("--use-dpp", stages, "2")
    assert (dpp["schedule"], dpp["schedule_options"]) == ("dpp", {"chunks": 2})
    # These have two stages per device by themselves.
    assert section("--schedule", "zb_v", stages, "2") == section("--schedule", "zb_v")
    assert section("--enable-bitpipe-schedule", layers, "4") == section("--enable-bitpipe-schedule")
    pipeline = ["--pipeline-model-parallel-size", "4"]
    for words, flag in (
        (["--num-layers", "32", *pipeline, layers, "3"], layers),
        (["--num-layers", "30", *pipeline, layers, "2"], layers),
        (["--num-layers", "32", layers, "4"], layers),
        (["--num-layers", "32", *pipeline, layers, "2", stages, "4"], f"{layers}, {stages}"),
        (["--num-layers", "32", *pipeline, "--enable-bitpipe-schedule", layers, "2"], f"{layers} 2"),
    ):
        assert problems(*ENOUGH, *words) == [flag]


def test_layers_are_on_the_devices_of_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device d has layers (c x D + d) x K to (c x D + d + 1) x K of every chunk c."""
    monkeypatch.chdir(tmp_path)
    words = (
        "--num-layers 12 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --dry-run"
    )
    args, plan = plan_job("train_gpt.py", [*ENOUGH, *words.split()], "gpt")
    boundaries = layer_boundaries(12, 0, 0, plan.layout.placement, "interleaved", args.stage_layers)
    assert boundaries == [0, 2, 4, 6, 8, 10, 12]
    assert plan.layout.placement.pipes == ((0, 1, 0, 1, 0, 1),)


def test_gradients_are_reduced_in_bf16() -> None:
    key = "communication_data_type"
    assert json_of("--bf16", "--grad-reduce-in-bf16")[key] == "bf16" and key not in json_of("--bf16")
    assert problems(*ENOUGH, "--grad-reduce-in-bf16") == ["--grad-reduce-in-bf16"]


def test_optimizer_of_the_flags(tmp_path: Path) -> None:
    assert json_of("--clip-grad", "0.5")["gradient_clipping"] == 0.5
    sgd = {"type": "SGD", "params": {"lr": 6e-4, "momentum": 0.9, "weight_decay": 0.01}}
    assert json_of("--optimizer", "sgd")["optimizer"] == sgd
    params = json_of("--optimizer", "sgd", "--sgd-momentum", "0.5", "--weight-decay", "0")["optimizer"][
        "params"
    ]
    assert (params["momentum"], params["weight_decay"]) == (0.5, 0)
    assert "momentum" not in json_of("--optimizer", "adam", "--sgd-momentum", "0.5")["optimizer"]["params"]
    # A JSON as Megatron-DeepSpeed writes it.
    job = write_job(
        tmp_path, {"train_batch_size": 32, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0}}
    )
    words = [*ENOUGH, "--adam-beta2", "0.95", "--zero-stage", "0", "--clip-grad", "1.0"]
    config = parse("train_gpt.py", [*job, *words])[1].deepspeed
    adam = {"type": "AdamW", "params": {"lr": 6e-4, "torch_adam": True, "betas": [0.9, 0.95]}}
    assert (
        config["ds_ext"] == {} and config["optimizer"] == adam and config["scheduler"]["type"] == "MegatronLR"
    )


def test_a_rate_of_the_json_is_constant(tmp_path: Path) -> None:
    optimizer = {"type": "Adam", "params": {"lr": 1e-3}}
    job = write_job(tmp_path, {"optimizer": optimizer, "ds_ext": {}})
    assert "scheduler" not in parse("train_gpt.py", [*job, "--lr", "1e-3"])[1].deepspeed
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    job = write_job(tmp_path, {"scheduler": scheduler})
    assert parse("train_gpt.py", [*job, *ENOUGH])[1].deepspeed["scheduler"] == scheduler


# --- launch scripts -------------------------------------------------------------------------------------------------

GPT_3 = """
--use-mcore-models --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024
--max-position-embeddings 1024 --attention-backend auto --micro-batch-size 2 --global-batch-size 64
--train-samples 640000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
--bf16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-samples 430000
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --data-path blend_text_document --vocab-file vocab.json
--merge-file merges.txt --tokenizer-type GPT2BPETokenizer --split 949,50,1 --num-workers 4 --log-interval 100
--save-interval 10000 --eval-interval 1000 --save out --load out --eval-iters 10 --ckpt-format torch_dist
--distributed-timeout-minutes 60 --distributed-backend nccl --log-throughput --no-gradient-accumulation-fusion
--transformer-impl local --manual-gc --tensorboard-queue-size 10
"""
LLAMA = """
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 24 --hidden-size 2048
--ffn-hidden-size 5504 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 32 --seq-length 2048
--max-position-embeddings 2048 --train-iters 250000 --save out/llama --load out/llama --data-path corpus_text_document
--data-impl mmap --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model --split '949,50,1'
--distributed-backend nccl --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1
--lr-warmup-iters 2000 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval 10000
--eval-interval 1000 --eval-iters 10 --bf16 --no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0
--use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm
--disable-bias-linear --num-key-value-heads 4 --deepspeed --zero-stage 1
--checkpoint-activations --deepspeed-activation-checkpointing --use-flash-attn-v2 --no-masked-softmax-fusion
"""
BERT = """
--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 32
--train-iters 1000000 --weight-decay 1e-2 --clip-grad 1.0 --fp16 --lr 0.0001 --lr-decay-iters 990000
--lr-decay-style linear --min-lr 1.0e-5 --lr-warmup-fraction .01 --data-path bert_text_sentence
--vocab-file vocab.txt --tokenizer-type BertWordPieceLowerCase --split 949,50,1 --log-interval 100
--save-interval 10000 --eval-interval 1000 --eval-iters 10 --distributed-backend nccl --save bert --load bert
--attention-softmax-in-fp32 --no-bias-dropout-fusion --timing-log-level 2 --dataloader-type single
"""
BLOOM = """
--pipeline-model-parallel-size 4 --tensor-model-parallel-size 1 --num-layers 30 --hidden-size 2560
--num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1
--global-batch-size 512 --train-samples 1_000_000 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8
--lr 1.6e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-samples 900_000 --lr-warmup-samples 10_240
--clip-grad 1.0 --weight-decay 1e-1 --bf16 --init-method-std 0.0048 --checkpoint-activations --seed 42
--log-interval 10 --save-interval 250 --eval-interval 1000 --eval-iters 1 --tensorboard-dir logs
--tensorboard-queue-size 5 --log-timers-to-tensorboard --log-batch-size-to-tensorboard
--log-validation-ppl-to-tensorboard --save ckpt --load ckpt --data-path oscar_text_document --data-impl mmap
--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --distributed-backend nccl
--partition-activations --deepspeed --deepspeed_config JOB --zero-stage 0
"""
QWEN = """
--num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 --kv-channels 128
--group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 40960 --swiglu
--normalization RMSNorm --norm-epsilon 1e-6 --qk-layernorm --disable-bias-linear --position-embedding-type rope
--no-position-embedding --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--micro-batch-size 1 --global-batch-size 128 --train-iters 5000 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine
--lr-warmup-iters 100 --weight-decay 0.1 --clip-grad 1.0 --bf16 --adam-beta1 0.9 --adam-beta2 0.95
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 1 --sequence-parallel
--use-distributed-optimizer --overlap-grad-reduce --recompute-granularity full --recompute-method uniform
--recompute-num-layers 1 --attention-backend flash --cross-entropy-loss-fusion --cross-entropy-fusion-impl te
--no-create-attention-mask-in-dataloader --accumulate-allreduce-grads-in-fp32 --tokenizer-type HuggingFaceTokenizer
--tokenizer-model Qwen3-0.6B --data-path mix_text_document --data-cache-path cache --split 99,1,0
--dataloader-type single
--make-vocab-size-divisible-by 128 --ckpt-format torch --async-save --override-opt_param-scheduler --no-load-rng
--log-interval 1 --save-interval 500 --eval-interval 500 --eval-iters 32 --save qwen --load qwen
"""
SCRIPT_WORDS = {"gpt3": GPT_3, "llama": LLAMA, "bert": BERT, "bloom": BLOOM, "qwen": QWEN}


def planned(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[argparse.Namespace, JobPlan]:
    monkeypatch.chdir(folder)
    batch = {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
    job = {**batch, "steps_per_print": 2000, "zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}
    path = write_job(folder, job)[1]
    model = "bert" if name == "bert" else "gpt"
    words = [path if word == "JOB" else word for word in SCRIPT_WORDS[name].split()]
    return plan_job(SCRIPTS[model], [*words, "--dry-run", "--hosts", "2x8"], model)


EXPECTED: dict[str, dict[str, Any]] = {
    "gpt3": {
        "layout": (4, 2, 2),
        "batch": (64, 16),
        "steps": 10000,
        "model": (12, 768, 12, 1024, "none"),
        "rate": (6e-5, "cosine", 6e-6, 6718.75, pytest.approx(6.71875)),
        "ignored": 11,
    },
    "llama": {
        "layout": (2, 2, 4),
        "batch": (32, 2),
        "steps": 250000,
        "model": (24, 2048, 16, 2048, "full"),
        "rate": (3e-4, "cosine", 3e-5, 250000, 2000),
        "ignored": 6,
    },
    "bert": {
        "layout": (2, 2, 4),
        "batch": (32, 2),
        "steps": 1000000,
        "model": (24, 1024, 16, 512, "none"),
        "rate": (1e-4, "linear", 1e-5, 990000, pytest.approx(9900)),
        "ignored": 5,
    },
    "bloom": {
        "layout": (4, 1, 4),
        "batch": (512, 128),
        "steps": 1953,
        "model": (30, 2560, 32, 2048, "full"),
        "rate": (1.6e-4, "cosine", 1e-5, 900_000 / 512, 20),
        "ignored": 7,
    },
    "qwen": {
        "layout": (2, 2, 4),
        "batch": (128, 32),
        "steps": 5000,
        "model": (28, 1024, 16, 4096, "full"),
        "rate": (1e-5, "cosine", 1e-6, 5000, 100),
        "ignored": 15,
    },
}


@pytest.mark.parametrize("name", SCRIPT_WORDS)
def test_launch_scripts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = EXPECTED[name]
    args, plan = planned(name, tmp_path, monkeypatch)
    layout, config = plan.layout, plan.job.deepspeed
    sizes = (layout.placement.devices_per_pipe, layout.tensor_parallel_size, layout.data_parallel_size)
    assert sizes == expected["layout"] and plan.timetable.schedule == "1f1b"
    assert (plan.sizes.train_batch_size, plan.sizes.micro_batches) == expected["batch"]
    assert args.train_iters == expected["steps"] and args.load is None
    fields = model_fields(args, plan.job)
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "recompute")
    assert tuple(fields[field] for field in names) == expected["model"]
    params = config["scheduler"]["params"]
    keys = ("decay_style", "min_lr", "total_num_steps", "warmup_num_steps")
    assert (config["optimizer"]["params"]["lr"], *(params[key] for key in keys)) == expected["rate"]
    assert config["optimizer"]["type"] == "AdamW" and config["gradient_clipping"] == 1.0
    ignored, missing, load = args.notes
    assert ignored.startswith("ignored ") and ignored.count(", ") + 1 == expected["ignored"]
    assert missing.startswith("missing ") and "--data-path" in missing and args.data_path == []
    assert load.startswith("load ") and str(args.save) in load


# Megatron-LM's script for Llama 3 8B, with a pipeline, and with one mistake of every kind.
LLAMA_3 = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --normalization RMSNorm --init-method-std 0.0134 --attention-backend fused
--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128
--train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001
--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
--grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
--empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --tensor-model-parallel-size 2 --context-parallel-size 1 --pipeline-model-parallel-size 4
--num-layers-per-virtual-pipeline-stage 2 --sequence-parallel --data-path /data/llama3_text_document
--tokenizer-type HuggingFaceTokenizer --tokenizer-model /models/Meta-Llama-3-8B --data-cache-path cache
--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1
--eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4
--profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save /nowhere/llama3
--load /nowhere/llama3 --tensorboard-dir tensorboard --wandb-project llama3 --wandb-exp-name llama3-8b
"""


def test_a_dry_run_of_a_whole_script_needs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: None if name == "wandb" else find(name, *more)
    )
    args, plan = plan_job("train_gpt.py", [*LLAMA_3.split(), "--dry-run"], "gpt")
    assert plan.timetable.schedule == "interleaved" and plan.layout.placement.stages == 16
    assert (args.train_iters, args.data_path, args.tokenizer) == (1953125000 // 128, [], None)
    (missing,) = [note for note in args.notes if note.startswith("missing ")]
    assert {"wandb", "--data-path", "--tokenizer"} <= set(re.findall(r"[\w-]+", missing))
    printed = capsys.readouterr().out
    job, _ = json.JSONDecoder().raw_decode(printed[printed.index("{") :])
    assert job["ds_ext"]["train"]["load"] == "/nowhere/llama3"  # for a restart, which finds it
    assert [*tmp_path.iterdir()] == []


def test_a_whole_script_takes_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "old" / "iter_0001000").mkdir(parents=True)
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("1000")
    mistakes = {
        "--seed": "x",  # no number
        "--sequence-length": "8192",  # unknown
        "--decoupled-lr": "5e-4",  # refused
        "--data-impl": "lazy",  # harmless with another value
        "--lr-warmup-fraction": "0.1",  # beside --lr-warmup-samples
        "--log-interval": "0",  # too small
        "--ffn-hidden-size": "14335",  # not divisible by the tensor-parallel size
        "--global-batch-size": "127",  # not divisible by the data-parallel size
        "--split": "a,b",
        "--stage-layers": "16,16",
        "--load": "old",
    }
    words = [*LLAMA_3.split(), *(word for pair in mistakes.items() for word in pair)]
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(ConfigError) as error:
        plan_job("train_gpt.py", words, "gpt")
    found = [line.partition(":")[0].split()[0].rstrip(",") for line in str(error.value).splitlines()]
    assert sorted(found) == sorted(
        [
            *("--seed", "--sequence-length", "--decoupled-lr", "--data-impl", "--log-interval", "--load"),
            *(
                "--lr-warmup-fraction",
                "tensorboard",
                "wandb",
                "--data-path",
                "--tokenizer",
                "--global-batch-size",
            ),
            *("--split", "--stage-layers", "tensor_parallel_size"),
        ]
    )


def test_a_wrong_size_hides_only_the_checks_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defaults of other sizes would contradict those that are set."""
    monkeypatch.chdir(tmp_path)

    def refused(*flags: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            plan_job("train_gpt.py", [*LLAMA_3.split(), *flags, "--dry-run"], "gpt")
        return [line.partition(":")[0] for line in str(error.value).splitlines()]

    assert refused("--num-attention-heads", "30", "--max-position-embeddings", "8") == [
        *("num_query_groups", "max_position_embeddings")
    ]
    assert refused("--num-layers", "x", "--split", "a", "--eval-iters", "-1") == [
        *("--num-layers", "--eval-iters", "--split")
    ]
    assert refused("--micro-batch-size", "x", "--num-attention-heads", "30") == [
        *("--micro-batch-size", "num_query_groups")
    ]
    (tmp_path / "job.json").write_text(
        '{"train_batch_size": 8, "ds_ext": {"scheduler": 1, "trace": {"x": 1}}}'
    )
    assert refused(
        "--deepspeed_config", "job.json", "--eval-iters", "-1", "--moe-expert-capacity-factor", "2"
    ) == [*("--moe-expert-capacity-factor", "ds_ext.trace.x", "ds_ext.scheduler", "--eval-iters")]


def test_the_families_of_launch_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args, plan = planned("llama", tmp_path, monkeypatch)
    llama = model_fields(args, plan.job)
    assert (llama["num_query_groups"], llama["normalization"], llama["add_bias_linear"]) == (
        4,
        "RMSNorm",
        False,
    )
    assert llama["swiglu"] and llama["untie_embeddings_and_output_weights"]
    assert plan.job.deepspeed["zero_optimization"] == {"stage": 1}
    args, plan = planned("qwen", tmp_path, monkeypatch)
    qwen = model_fields(args, plan.job)
    assert qwen["qk_layernorm"] and (qwen["kv_channels"], qwen["rotary_base"]) == (128, 1e6)


# --- written JSON ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
@pytest.mark.parametrize("model", SCRIPTS)
def test_written_json(model: Model, schedule: str, tmp_path: Path) -> None:
    own = {
        "gpt": {"swiglu": True, "rotary_base": 5e5},
        "bert": {"mask_prob": 0.2, "bert_no_binary_head": True},
    }[model]
    flags = " ".join(
        f"--{key.replace('_', '-')} {'' if value is True else value}" for key, value in own.items()
    )
    words = [
        *ENOUGH,
        *flags.split(),
        *HARMLESS.split(),
        "--schedule",
        schedule,
        "--pipeline-model-parallel-size",
        "2",
    ]
    words += ["--train-samples", "320", "--checkpoint-activations", "--data-path", "0.3", "a", "0.7", "b"]

    def jobs(words: list[str]) -> tuple[argparse.Namespace, JobConfig]:
        return parse(SCRIPTS[model], words, model)

    args, job = jobs(words)
    written = finished_json(SCRIPTS[model], words, model, args, job)
    keys = {"train_iters", "recompute_granularity", "data_path", *own}
    assert written["ds_ext"]["train"].keys() == keys
    again = write_job(tmp_path, written)
    read_args, read_job = jobs(again)
    assert read_job.deepspeed == {**job.deepspeed, "ds_ext": read_job.deepspeed["ds_ext"]}
    values = {
        key: value for key, value in vars(args).items() if key in {*keys, "ffn_hidden_size", "num_layers"}
    }
    assert values == {key: vars(read_args)[key] for key in values}
    assert finished_json(SCRIPTS[model], again, model, read_args, read_job) == written
