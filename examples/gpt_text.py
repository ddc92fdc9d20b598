"""Fine-tunes a small GPT on real text with Lightning's Trainer; an OptForge recipe decides how it is trained.

    python examples/gpt_text.py --steps 200
    python examples/gpt_text.py --steps 200 --recipe baseline        # the same training as it is

The text is the corpus that the package reads (data=wikipedia), a token is a byte, and the model is a Llama of transformers with
a million weights, from random ones. The recipe trains weights in bf16 with fp32 copies of them in the optimizer, which
`configure_optimizers` takes from OptForge; leave `precision` of Trainer alone.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from optforge.data.text import Text
from optforge.lightning import OptForgeCallback, optimizer

BYTES = 256
OVERRIDES = ("~steps.compile",)
"""Compiling pays back in longer trainings; without it the example starts at once."""


class Windows(Dataset):
    """Windows of `length` bytes of the corpus, int64, without overlap."""

    def __init__(self, length: int, characters: int) -> None:
        text = ""
        for document in Text().documents():
            text += document
            if len(text) >= characters:
                break
        data = torch.tensor(list(text.encode()), dtype=torch.int64)
        self.windows = data[: len(data) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class GPT(lightning.LightningModule):
    """A decoder of four layers over bytes."""

    def __init__(self, *, width: int = 128, layers: int = 4, length: int = 128, batch_size: int = 8, characters: int = 400_000) -> None:
        super().__init__()
        self.length, self.batch_size, self.characters = length, batch_size, characters
        config = LlamaConfig(
            vocab_size=BYTES,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=length,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = LlamaForCausalLM(config)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self, lr=1e-3)

    def train_dataloader(self) -> DataLoader:
        draw = torch.Generator().manual_seed(0)
        return DataLoader(Windows(self.length, self.characters), batch_size=self.batch_size, shuffle=True, generator=draw)


def train(recipe: str, steps: int, **sizes: int) -> GPT:
    """The model after `steps` updates; its `losses` has the loss of each."""
    lightning.seed_everything(0, verbose=False)
    callback = OptForgeCallback(recipe, overrides=OVERRIDES if recipe != "baseline" else ())
    trainer = lightning.Trainer(
        max_steps=steps,
        callbacks=[callback],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = GPT(**sizes)
    trainer.fit(model)
    for name, receipt in callback.receipts.items():
        print(f"step {name}: {len(receipt.touched)} modules")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="llama_bf16_train")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    losses = train(given.recipe, given.steps).losses
    print(f"loss of the first ten steps {sum(losses[:10]) / 10:.3f}, of the last ten {sum(losses[-10:]) / 10:.3f} nats a byte")


if __name__ == "__main__":
    main()
