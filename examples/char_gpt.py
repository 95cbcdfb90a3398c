"""Train a character-level GPT-2 with constrained attention on a text file, by a plain loop or by transformers' Trainer.

    python examples/char_gpt.py TEXT                       # a plain loop, some minutes on two cores
    python examples/char_gpt.py TEXT --trainer             # the same model by transformers.Trainer
    python examples/char_gpt.py TEXT --unconstrained       # ordinary attention under AdamW, to compare
    torchrun --nproc-per-node 2 examples/char_gpt.py TEXT  # data parallel; --fsdp to shard parameters as well

It needs transformers (and accelerate for --trainer): pip install "geodescent[integration]".
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from geodescent.attention import constrain, parameter_groups
from geodescent.optim import RiemannianAdam
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


class Text:
    """A text as numbers, nine tenths for training and one for validation, read in windows."""

    def __init__(self, path: Path, length: int) -> None:
        text = path.read_text(encoding="utf-8")
        self.characters = sorted(set(text))
        numbers = {c: i for i, c in enumerate(self.characters)}
        data = torch.tensor([numbers[c] for c in text])
        cut = len(data) * 9 // 10
        self.parts, self.length = {"train": data[:cut], "validation": data[cut:]}, length
        if min(len(part) for part in self.parts.values()) <= length:
            raise SystemExit(f"{path} is too short: {len(data)} characters for windows of {length}")

    def batch(self, part: str, size: int, generator: torch.Generator) -> Tensor:
        data = self.parts[part]
        starts = torch.randint(len(data) - self.length, (size,), generator=generator)
        return torch.stack([data[i : i + self.length] for i in starts.tolist()])

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[i] for i in tokens.tolist())


def build(text: Text, arguments: argparse.Namespace) -> GPT2LMHeadModel:
    torch.manual_seed(arguments.seed)
    config = GPT2Config(
        vocab_size=len(text.characters),
        n_positions=text.length,
        n_embd=arguments.width,
        n_layer=arguments.layers,
        n_head=arguments.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.loss_type = "ForCausalLM"
    model = GPT2LMHeadModel(config)
    if arguments.double:
        model.double()
    if not arguments.unconstrained:
        report = constrain(model)
        if arguments.rank == 0:
            print(report)
    return model


def make_optimizer(model: nn.Module, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    if arguments.unconstrained:
        return torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.1)
    # the groups name their manifold, which sharded parameters no longer know
    return RiemannianAdam(parameter_groups(model), lr=arguments.lr, weight_decay=0.1)


@torch.no_grad()
def validate(model: nn.Module, text: Text, arguments: argparse.Namespace) -> float:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(8):
        tokens = text.batch("validation", arguments.batch, generator)
        losses.append(float(model(input_ids=tokens, labels=tokens).loss))
    return sum(losses) / len(losses)


def train_by_loop(model: GPT2LMHeadModel, text: Text, arguments: argparse.Namespace) -> None:
    """Every process takes its share of a batch that all draw alike, so the result does not depend on their number."""
    wrapped: nn.Module = model
    if arguments.world > 1 and arguments.fsdp:
        from torch.distributed.fsdp import fully_shard

        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    elif arguments.world > 1:
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(model, arguments)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    generator = torch.Generator().manual_seed(arguments.seed)
    for step in range(arguments.steps):
        tokens = text.batch("train", arguments.batch, generator)[arguments.rank :: arguments.world]
        optimizer.zero_grad()
        loss = wrapped(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        if arguments.rank == 0 and (step % arguments.every == 0 or step == arguments.steps - 1):
            print(f"step {step:5d}  loss {loss.item():.3f}", flush=True)


def train_by_trainer(model: GPT2LMHeadModel, text: Text, arguments: argparse.Namespace) -> None:
    from transformers import Trainer, TrainingArguments

    class Windows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return arguments.steps * arguments.batch

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            generator = torch.Generator().manual_seed(arguments.seed * 1_000_003 + index)
            tokens = text.batch("train", 1, generator)[0]
            return {"input_ids": tokens, "labels": tokens}

    settings = TrainingArguments(
        output_dir=str(arguments.out),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        lr_scheduler_type="cosine",
        logging_steps=arguments.every,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        seed=arguments.seed,
    )
    Trainer(model, settings, train_dataset=Windows(), optimizers=(make_optimizer(model, arguments), None)).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--trainer", action="store_true", help="train by transformers.Trainer")
    parser.add_argument("--unconstrained", action="store_true", help="leave the attention as it is, under AdamW")
    parser.add_argument("--fsdp", action="store_true", help="with torchrun: shard parameters, frames whole")
    parser.add_argument("--double", action="store_true", help="in double precision, to compare runs")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16, help="windows a step, of all processes together")
    parser.add_argument("--length", type=int, default=64, help="characters of a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=50, help="steps between lines")
    parser.add_argument("--out", type=Path, default=Path("char_gpt"), help="folder for weights and Trainer's files")
    arguments = parser.parse_args()
    arguments.rank, arguments.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.world > 1 and not arguments.trainer:
        dist.init_process_group("gloo")
    text = Text(arguments.text, arguments.length)
    model = build(text, arguments)
    (train_by_trainer if arguments.trainer else train_by_loop)(model, text, arguments)
    if arguments.world > 1 and arguments.fsdp:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    else:
        state = model.state_dict()
    if arguments.rank == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        torch.save(state, arguments.out / "weights.pt")  # under GPT-2's own names, of ordinary matrices
    if arguments.world == 1 or not arguments.fsdp:
        loss = validate(model.eval(), text, arguments)
        if arguments.rank == 0:
            print(f"validation loss {loss:.3f} nats a character")
            prompt = text.batch("validation", 1, torch.Generator().manual_seed(0))[:, : text.length // 2]
            sample = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=text.length // 2, do_sample=False
            )
            print(text.decode(sample[0]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
