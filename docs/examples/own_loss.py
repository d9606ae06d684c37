"""A listwise loss of one's own, from one function; with distap it takes memory linear in the batch,
over all ranks.

In a recipe it is `loss: {name: "own_loss:hinge", margin: 0.2}`, with this folder on PYTHONPATH.
"""

import timm
import torch

import distap


@distap.loss
def hinge(similarities, same_class, margin=0.1):
    """How far the hardest negative comes within a margin of each positive; one value a query."""
    hardest = similarities.masked_fill(same_class, -1).amax(1, keepdim=True)
    return ((hardest - similarities + margin).clamp(min=0) * same_class).sum(1) / same_class.sum(1)


if __name__ == "__main__":
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=0).eval()
    images = torch.randn(64, 3, 64, 64)
    labels = torch.arange(64) // 4
    loss = distap.Multistage(network, hinge(margin=0.2), micro_batch=16)(images, labels)
    loss.backward()
    print(f"loss {loss.item():.4f}")
