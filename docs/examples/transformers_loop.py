"""Multistage in a Trainer of Hugging Face's transformers, around its ViT: `pip install transformers
accelerate`.

python transformers_loop.py FOLDER   # of checkpoints; called again, it goes on from the newest one
"""

import sys
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, ViTConfig, ViTModel

import distap


class Retrieval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        vit = ViTModel(ViTConfig(image_size=32, patch_size=8, **size), add_pooling_layer=False)
        # The class token of what a ViT of transformers returns; `output="pooler_output"` would need
        # no pooling.
        taken = {"output": "last_hidden_state", "pooling": "cls"}
        self.multistage = distap.Multistage(vit, loss="ap_q", micro_batch=8, memory=64, **taken)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.multistage(pixels, labels)}


torch.manual_seed(0)
labels = torch.arange(320) // 4
# a pattern a class, under noise
images = torch.randn(80, 3, 32, 32)[labels] + torch.randn(320, 3, 32, 32)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=64,
    max_steps=6,
    save_steps=3,
    logging_steps=1,
    learning_rate=1e-3,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
    disable_tqdm=True,
    remove_unused_columns=False,
)
data = [{"pixels": image, "labels": label} for image, label in zip(images, labels, strict=True)]
trainer = Trainer(Retrieval(), arguments, train_dataset=data)
trainer.train(resume_from_checkpoint=any(Path(sys.argv[1]).glob("checkpoint-*")))
