"""Multistage in a LightningModule, on any number of processes: `pip install lightning`.

torchrun --nproc-per-node 2 lightning_loop.py
"""

import os

import timm
import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import distap


class Retrieval(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = timm.create_model("test_resnet", num_classes=0)
        self.multistage = distap.Multistage(
            self.network, loss="ap_q", micro_batch=8, freeze_batchnorm=True
        )

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss: torch.Tensor = self.multistage(*batch)  # Lightning's DDP reduces the gradients, once
        if self.trainer.is_global_zero:
            print(f"step {number}: loss {loss.item():.7f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), lr=3.0, momentum=0.9)


torch.manual_seed(0)
labels = torch.arange(320) // 4
# a pattern a class, under noise
images = torch.randn(80, 3, 32, 32)[labels] + torch.randn(320, 3, 32, 32)
model = Retrieval()
ranks, rank = (int(os.environ.get(name, alone)) for name, alone in (("WORLD_SIZE", 1), ("RANK", 0)))
data = TensorDataset(images, labels)
loader = DataLoader(data, 64 // ranks, sampler=DistributedSampler(data, ranks, rank, shuffle=False))
trainer = Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    max_epochs=1,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader)
