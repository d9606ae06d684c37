"""The table of everything that a recipe chooses by name: each name and the path of its class.

To add a class to distap, write it and add its line here. A class from elsewhere needs no line: a
recipe names it as `package.module:Class`. Either way the class is a dataclass or a pydantic model,
its fields are the keys next to `name`, and it has the methods that METHODS lists for its kind.
"""

REGISTRY: dict[str, dict[str, str]] = {
    "loss": {
        "ap_q": "distap.ranking.losses.quantized:QuantizedAP",
        "ap_t": "distap.ranking.losses.quantized:TieAwareAP",
        "fast_ap": "distap.ranking.losses.quantized:FastAP",
        # Ramzi et al. 2021 call AP_Q so.
        "softbin": "distap.ranking.losses.quantized:QuantizedAP",
        "smooth_ap": "distap.ranking.losses.smooth:SmoothAP",
        "sup_ap": "distap.ranking.losses.smooth:SupAP",
        "pnp": "distap.ranking.losses.smooth:PNP",
        "recall_at_k": "distap.ranking.losses.smooth:RecallAtK",
        "sup_recall_at_k": "distap.ranking.losses.smooth:SupRecallAtK",
        "h_ap": "distap.ranking.losses.graded:HierarchicalAP",
        "smooth_ndcg": "distap.ranking.losses.graded:SmoothNDCG",
        "sup_ndcg": "distap.ranking.losses.graded:SupNDCG",
        "calibration": "distap.ranking.losses.calibration:Calibration",
        "roadmap": "distap.ranking.losses.calibration:Roadmap",
        "blackbox_ap": "distap.ranking.losses.blackbox:BlackBoxAP",
        "multi_similarity": "distap.ranking.losses.pairs:MultiSimilarity",
        "sup_con": "distap.ranking.losses.pairs:SupCon",
        "info_nce": "distap.ranking.losses.pairs:InfoNCE",
        "sigmoid": "distap.ranking.losses.pairs:Sigmoid",
        "contrastive": "distap.ranking.losses.pairs:Contrastive",
        "triplet": "distap.ranking.losses.pairs:Triplet",
        "proxy_nca": "distap.ranking.losses.proxies:ProxyNCA",
        "proxy_anchor": "distap.ranking.losses.proxies:ProxyAnchor",
        "arc_face": "distap.ranking.losses.proxies:ArcFace",
        "cos_face": "distap.ranking.losses.proxies:CosFace",
        "normalized_softmax": "distap.ranking.losses.proxies:NormalizedSoftmax",
        "csl": "distap.ranking.losses.proxies:CrossScaleLearning",
        "distil_features": "distap.ranking.losses.distillation:DistilFeatures",
        "distil_relations": "distap.ranking.losses.distillation:DistilRelations",
        "compatible": "distap.ranking.losses.distillation:Compatible",
        "koleo": "distap.ranking.losses.distillation:KoLeo",
        "matryoshka": "distap.ranking.losses.sums:Matryoshka",
        "sum": "distap.ranking.losses.sums:WeightedSum",
        "within": "distap.ranking.losses.within:Within",
        "by_set": "distap.ranking.losses.within:BySet",
        "simix": "distap.ranking.losses.simix:SiMix",
    },
    "sampling": {
        "random": "distap.data.sampling.random_images:RandomSampling",
        "classes": "distap.data.sampling.every_class:ClassesSampling",
        "mined": "distap.data.sampling.mined:MinedSampling",
        "p_by_k": "distap.data.sampling.p_by_k:PByKSampling",
        "super_p_by_k": "distap.data.sampling.super_p_by_k:SuperPByKSampling",
    },
    "augmentation": {
        "crop_flip_colour": "distap.data.images.augmentation:CropFlipColour",
        "torchvision": "distap.data.images.augmentation:TorchvisionSteps",
    },
    "source": {
        "indexed": "distap.data.loading.indexed:IndexedSource",
        "streamed": "distap.data.loading.streamed:StreamedSource",
    },
    "backbone": {
        "timm": "distap.model.backbone:TimmBackbone",
    },
    "weights": {
        "timm": "distap.model.weights:TimmWeights",
        "random": "distap.model.weights:RandomWeights",
        "file": "distap.model.weights:FileWeights",
        "package": "distap.model.weights:PackageWeights",
        "run": "distap.model.trained:RunWeights",
    },
    "pooling": {
        "auto": "distap.model.pooling:AutoPooling",
        "gem": "distap.model.pooling:GeMPooling",
        # Each of these is one formula of the class, which receives the name.
        "native": "distap.model.pooling:NamedPooling",
        "mean": "distap.model.pooling:NamedPooling",
        "spoc": "distap.model.pooling:NamedPooling",
        "max": "distap.model.pooling:NamedPooling",
        "cls": "distap.model.pooling:NamedPooling",
        "cls_mean": "distap.model.pooling:NamedPooling",
    },
    "adapter": {
        # One class, which receives the name: dora adds magnitudes to lora.
        "lora": "distap.model.adapters:Adapter",
        "dora": "distap.model.adapters:Adapter",
    },
    "optimizer": {
        # timm's optimisers, by timm's names. The class receives the name.
        "adam": "distap.training.optimizer:TimmOptimizer",
        "adamw": "distap.training.optimizer:TimmOptimizer",
        "nadamw": "distap.training.optimizer:TimmOptimizer",
        "radam": "distap.training.optimizer:TimmOptimizer",
        "sgd": "distap.training.optimizer:TimmOptimizer",
        "momentum": "distap.training.optimizer:TimmOptimizer",
        "rmsprop": "distap.training.optimizer:TimmOptimizer",
        "lamb": "distap.training.optimizer:TimmOptimizer",
        "lars": "distap.training.optimizer:TimmOptimizer",
        "lion": "distap.training.optimizer:TimmOptimizer",
        "adafactor": "distap.training.optimizer:TimmOptimizer",
        "adopt": "distap.training.optimizer:TimmOptimizer",
        "adadelta": "distap.training.optimizer:TimmOptimizer",
        "adamax": "distap.training.optimizer:TimmOptimizer",
        "cadamw": "distap.training.optimizer:TimmOptimizer",
        "radamw": "distap.training.optimizer:TimmOptimizer",
        "sgdw": "distap.training.optimizer:TimmOptimizer",
    },
    "schedule": {
        # One class, which receives the name.
        "constant": "distap.training.schedule:RateSchedule",
        "linear": "distap.training.schedule:RateSchedule",
        "cosine": "distap.training.schedule:RateSchedule",
        "multistep": "distap.training.schedule:RateSchedule",
    },
    "engine": {
        "ddp": "distap.training.engines:DDPSettings",
        "fsdp": "distap.training.engines:FSDPSettings",
        "deepspeed": "distap.training.engines:DeepSpeedSettings",
    },
    "logger": {
        "tensorboard": "distap.telemetry.runlog:TensorBoard",
        "wandb": "distap.telemetry.runlog:WeightsAndBiases",
    },
}

# The methods that distap calls on an object of each kind.
METHODS: dict[str, tuple[str, ...]] = {
    "loss": ("value_and_gradient",),
    "sampling": ("check", "batch"),
    "augmentation": ("transform",),
    "source": ("open",),
    "backbone": ("build",),
    "weights": ("load",),
    "pooling": ("build",),
    "adapter": ("adapt",),
    "optimizer": ("build",),
    "schedule": ("factor",),
    "engine": ("build",),
    "logger": ("open",),
}

# The base class of losses, which has the methods that most of them do not write themselves.
LOSS_BASE = "distap.ranking.loss:Loss"

# Prefixes of networks that timm does not list: `hf-hub:ORGANISATION/NAME` and `local-dir:FOLDER`.
SOURCES = ("hf-hub:", "local-dir:")

# The name, in the record of a run, of an object in Python that no recipe can name.
GIVEN = "given"
