"""Distillation and weights of images: tensors of each image that reach the loss by their names.

`extra={"teacher": ...}` is cut, padded and gathered as the descriptors are. A parameter without a
default takes it.
"""

import timm
import torch
from torch.nn.functional import cosine_similarity, kl_div, normalize

import distap


def of_features(descriptors, labels, teacher):
    """Feature distillation: the descriptors themselves, of as many dimensions as the teacher's."""
    return (1 - cosine_similarity(descriptors, teacher)).mean()


@distap.loss
def of_relations(descriptors, labels, teacher, temperature=0.1):
    """Relational distillation: each image's similarities to the others, whatever the teacher's
    dimensions.
    """
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    ours, theirs = (
        (of @ of.t() / temperature).masked_fill(itself, -1e9).log_softmax(1)
        for of in (descriptors, normalize(teacher.to(descriptors)))
    )
    return kl_div(ours, theirs, reduction="batchmean", log_target=True)


@distap.loss
def hinge(similarities, same_class, trust, margin=0.1):
    """A loss by queries gets the rows of its queries, (r,), on every rank."""
    hardest = similarities.masked_fill(same_class, -1).amax(1, keepdim=True)
    return (
        trust
        * ((hardest - similarities + margin).clamp(min=0) * same_class).sum(1)
        / same_class.sum(1)
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=0).eval()
    images = torch.randn(64, 3, 64, 64)
    labels = torch.arange(64) // 4
    teacher = torch.randn(64, 96)
    trust = torch.rand(64)
    terms = {"ap_q": 1.0, "distillation:of_relations": 0.5, "distillation:hinge": 0.1}
    loss = distap.Multistage(network, terms)(
        images, labels, extra={"teacher": teacher, "trust": trust}
    )
    weighted = distap.Multistage(network, "smooth_ap", weights="given")(
        images, labels, extra={"weights": trust}
    )
    (loss + weighted).backward()
    print(f"loss {(loss + weighted).item():.4f}")
