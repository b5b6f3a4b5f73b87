"""Train a decoder of transformers in a script of your own, with all weights or with LoRA.

    torchrun --nproc_per_node 2 examples/finetune_decoder.py --create --lora 8

``--create`` writes a small random Llama to ``--model`` if that folder does not exist. The samples are random tokens.
``train_gpt.py --hf-model`` fine-tunes a folder on chat data or text without a script.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ds_ext
from ds_ext.launch import process

SEQ_LENGTH = 64


class RandomTokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples of the form (inputs, labels). The model's loss shifts the labels itself."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index % 8)
        ids_S = torch.randint(3, 512, (SEQ_LENGTH,), generator=generator)
        return ids_S, ids_S


def create(folder: Path) -> None:
    """Write a random Llama of 8 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Train, and save a checkpoint of the trained parameters; with LoRA also peft's adapter folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", default=str(Path(__file__).with_suffix(".json")))
    parser.add_argument("--model", type=Path, default=Path("tiny_llama"), help="folder with config.json")
    parser.add_argument("--create", action="store_true", help="create the folder with a random model")
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapters; 0: train all weights")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", type=Path, default=Path("finetuned"))
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
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
    engine, *_ = ds_ext.initialize(
        model=model, model_parameters=model.parameters(), training_data=RandomTokens()
    )
    metrics = ds_ext.Metrics(engine, total_steps=args.steps, tokens_per_sample=SEQ_LENGTH, log_interval=5)
    while engine.global_steps < args.steps:
        metrics.log(engine.train_batch())
    engine.save_checkpoint(args.save, exclude_frozen_parameters=bool(args.lora))
    metrics.print_summary()
    if lora is not None:
        ds_ext.save_adapter(engine, lora, args.save / "adapter")


if __name__ == "__main__":
    process.run(main)
