"""Script in the shape of gpt-neox: a subclass with tied embeddings, a topology instead of num_stages, and set_batch_fn.

Masks travel between the stages. Checkpoints have a tag and a client state.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed import initialize
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

VOCABULARY, HIDDEN = 32, 16
MICRO_BATCHES = 8  # per step, over all data-parallel ranks


class EmbeddingPipe(nn.Embedding):
    def __init__(self):
        torch.manual_seed(99)
        super().__init__(VOCABULARY, HIDDEN)

    @property
    def word_embeddings_weight(self):
        return self.weight

    def forward(self, input) -> Any:
        tokens_BT, positions_BT, mask_TT = input
        return super().forward(tokens_BT) + positions_BT[..., None] / VOCABULARY, mask_TT


class TransformerLayerPipe(nn.Module):
    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, args):
        hidden_BTD, mask_TT = args
        normed_BTD = self.norm(hidden_BTD)
        scores_BTT = (normed_BTD @ normed_BTD.transpose(1, 2)).masked_fill(mask_TT, -1e4)
        return hidden_BTD + self.mlp(scores_BTT.softmax(-1) @ normed_BTD), mask_TT


def without_mask(args):
    return args[0]


def head(embedding, hidden_BTD):
    return F.linear(hidden_BTD, embedding.word_embeddings_weight)


def cross_entropy(output, labels, _fp16=False):
    labels_BT, loss_mask_BT = labels
    losses_BT = F.cross_entropy(output.flatten(0, 1), labels_BT.flatten(), reduction="none").view_as(
        labels_BT
    )
    return (losses_BT * loss_mask_BT).sum() / loss_mask_BT.sum()


class GPT2ModelPipe(PipelineModule, nn.Module):
    def __init__(self, num_layers, topology=None):
        self.specs = [
            TiedLayerSpec("embed", EmbeddingPipe, tied_weight_attr="weight"),
            *(LayerSpec(TransformerLayerPipe, number) for number in range(num_layers)),
            without_mask,
            LayerSpec(nn.LayerNorm, HIDDEN),
            TiedLayerSpec("embed", EmbeddingPipe, forward_fn=head, tied_weight_attr="weight"),
        ]
        super().__init__(
            layers=self.specs,
            loss_fn=partial(cross_entropy, _fp16=False),
            topology=topology,
            activation_checkpoint_interval=1,
            partition_method="type:transformer",
            checkpointable_layers=["TransformerLayerPipe"],
        )


def get_batch_pipe(data):
    text_BT = data["text"].long()
    tokens_BT, labels_BT = text_BT[:, :-1].contiguous(), text_BT[:, 1:].contiguous()
    length = tokens_BT.shape[1]
    positions_BT = torch.arange(length).expand_as(tokens_BT).contiguous()
    mask_TT = torch.ones(length, length).triu(1).bool()
    return (tokens_BT, positions_BT, mask_TT), (labels_BT, torch.ones(labels_BT.shape))


def samples(engine, seed):
    """Endless batches of this data-parallel rank."""
    count, step = engine.micro_batches, 0
    while True:
        for index in range(count):
            number = step * MICRO_BATCHES + engine.mpu.get_data_parallel_rank() * count + index
            generator = torch.Generator().manual_seed(1000 * seed + number)
            yield {"text": torch.randint(VOCABULARY, (2, 9), generator=generator)}
        step += 1


def main(config, folder):
    topology = PipeModelDataParallelTopology(num_pp=4, num_mp=1, num_dp=1)
    model = GPT2ModelPipe(num_layers=8, topology=topology)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    engine, optimizer, _, _ = initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.01),
        config=config,
        dist_init_required=False,
    )
    engine.total_params = sum(p.numel() for p in engine.module.parameters())
    engine.set_has_attention_mask(True)
    engine.set_batch_fn(get_batch_pipe)
    train_iterator, valid_iterator = samples(engine, 0), samples(engine, 1)
    losses = [engine.train_batch(data_iter=train_iterator).item() for _ in range(2)]
    engine.timers("train_batch").reset()
    engine.eval()
    evaluated = engine.eval_batch(valid_iterator).item()
    engine.train()
    engine.save_checkpoint(folder, tag="global_step2", client_state={"iteration": 2, "args": {"layers": 8}})
    losses.append(engine.train_batch(data_iter=train_iterator).item())
    path, state = engine.load_checkpoint(
        folder,
        tag="global_step2",
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
        load_module_only=False,
        load_module_strict=True,
    )
    again = engine.eval_batch(samples(engine, 1)).item()
    assert path is not None and engine.global_steps == 2
    return {
        "losses": losses,
        "evaluated": [evaluated, again],
        "iteration": state["iteration"],
        "optimizer": len(optimizer.param_groups),
    }
