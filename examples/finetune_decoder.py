"""Fine-tune a decoder of transformers in a pipeline, with all weights or with LoRA.

    torchrun --nproc_per_node 2 examples/finetune_decoder.py --create --lora 8
    deepspeed --num_gpus 2 examples/finetune_decoder.py --create --lora 8

``--create`` writes a small random Llama to ``--model`` if that folder does not exist. The samples are random tokens, or
the conversations of ``--data``:

    python -m ds_ext prepare --format chat --source chat.jsonl --tokenizer MODEL --output data/chat
    torchrun --nproc_per_node 4 examples/finetune_decoder.py --deepspeed_config data/chat/lora.json

"train" in the JSON has the defaults of the flags.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ds_ext
from ds_ext.config.job import load_config
from ds_ext.errors import ConfigError
from ds_ext.launch import process
from ds_ext.recipes.data.chat.unpacked import ConversationDataset, pad_conversations


class RandomTokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples of the form (inputs, labels). The model's loss shifts the labels itself."""

    def __init__(self, seq_length: int) -> None:
        self.mean_tokens = seq_length

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index % 8)
        ids_S = torch.randint(3, 512, (self.mean_tokens,), generator=generator)
        return ids_S, ids_S


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def create(folder: Path) -> None:
    """Write a random Llama of 8 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Train, and save a checkpoint of the trained parameters; with LoRA also peft's adapter folder.

    ConfigError: "train" in the JSON has keys that are no flags.
    """
    parser = argparse.ArgumentParser()
    beside = str(Path(__file__).with_suffix(".json"))
    parser.add_argument("--deepspeed_config", default=beside, help="JSON; default: the one of this script")
    parser.add_argument("--model", type=Path, default=Path("tiny_llama"), help="folder with config.json")
    parser.add_argument("--create", action="store_true", help="create the folder with a random model")
    parser.add_argument("--data", help="folder of prepare --format chat; default: random tokens")
    parser.add_argument("--seq-length", type=int, default=64, help="largest number of tokens of a sample")
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapters; 0: train all weights")
    parser.add_argument("--steps", type=int, default=20, help="last step")
    parser.add_argument("--lr", type=float, help="learning rate; default: that of the checkpoint or the JSON")
    parser.add_argument("--validation", help="folder of prepare --format chat, evaluated at the end")
    parser.add_argument("--load", type=Path, help="folder of --save, to continue from")
    parser.add_argument("--save", type=Path, default=Path("finetuned"))
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    args = parser.parse_args()
    train = load_config(args.deepspeed_config).ds_ext.train
    if unknown := sorted(train.keys() - vars(args).keys()):
        raise ConfigError(
            f"train: unknown keys (got {unknown}). Use the JSON of the command that prepare prints."
        )
    parser.set_defaults(**train)
    args = parser.parse_args()

    ds_ext.init_distributed()
    if args.create and dist.get_rank() == 0 and not args.model.exists():
        create(args.model)
    dist.barrier()
    lora = None
    if args.lora:
        import peft

        lora = peft.LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear")
    layers, loss_fn = ds_ext.from_transformers(args.model, lora=lora)
    model = ds_ext.PipelineModule(layers, args.deepspeed_config, loss_fn=loss_fn)
    if args.data:
        data = ConversationDataset(args.data, args.seq_length, args.model)
        say(f"chat      {data.summary()}")
    else:
        data = RandomTokens(args.seq_length)
    engine, *_ = ds_ext.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=data,
        collate_fn=pad_conversations,
        config=args.deepspeed_config,
    )
    samples = args.steps * engine.train_batch_size()
    say(f"samples   {samples} up to step {args.steps}, {samples / len(data):.1f} epochs")
    tokens = round(data.mean_tokens)
    epochs = {"samples_per_epoch": len(data)} if samples > len(data) else {}
    metrics = ds_ext.Metrics(
        engine, total_steps=args.steps, tokens_per_sample=tokens, log_interval=5, **epochs
    )
    if args.load:
        engine.load_checkpoint(args.load)
    if args.lr is not None:
        for group in engine.optimizer.param_groups:  # after loading, which restores the one of the checkpoint
            group["lr"] = args.lr
    while engine.global_steps < args.steps and not engine.should_stop():
        metrics.log(engine.train_batch())
    engine.save_checkpoint(args.save, exclude_frozen_parameters=bool(args.lora))
    metrics.print_summary()
    if args.validation and not engine.should_stop():
        validation = ConversationDataset(args.validation, args.seq_length, args.model)
        say(f"validation loss {float(engine.eval_batch(validation, num_micro_batches='all')):.4f}")
    if lora is not None:
        ds_ext.save_adapter(engine, lora, args.save / "adapter")
        say(f"adapter   {args.save / 'adapter'}")
    elif not args.create:
        say(f"next: python -m ds_ext convert {args.save} --to hf {args.save}_hf --hf-model {args.model}")


if __name__ == "__main__":
    process.run(main)
