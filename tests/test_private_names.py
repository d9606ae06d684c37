"""The private names of other packages that we use, and why. Such a name may go with any release.

When one goes, a test here fails with the reason for it; then look for a public way, and raise the
bound of torch in pyproject.toml to what CI has seen.
"""

import ast
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "distap"
# Module, name in it, and what we need it for.
NAMES = {
    ("torch._dynamo", "config"): "how ranking is compiled",
    ("torch._subclasses.fake_tensor", "FakeTensorMode"): "the cost of a network without running it",
    (
        "torch.fx.experimental._config",
        "",
    ): "sizes that ranking's compiled functions take as unknown",
    ("torch.nn.modules.batchnorm", "_BatchNorm"): "every kind of BatchNorm",
    ("torch.nn.modules.batchnorm", "_NormBase"): "layers with running statistics",
    ("torch.utils._python_dispatch", "TorchDispatchMode"): "counting operations",
    ("torch.utils._pytree", "tree_leaves"): "tensors in a batch of any shape",
    ("torch.utils._pytree", "tree_map"): "tensors in a batch of any shape",
    ("torch.utils._pytree", "tree_map_only"): "tensors in a batch of any shape",
    (
        "timm.models._hub",
        "load_model_config_from_path",
    ): "the configuration of a network in a folder",
}
# Attributes of objects of other packages, and what we need them for; tests of their places run
# them.
ATTRIBUTES = {
    "_auto_reshard_after_forward": "FSDP2: whether the network itself stays whole after a pass",
    "_fsdp_param_group": "FSDP2: the same in older releases of torch",
    "_fsdp_param_groups": "FSDP2: when a unit is freed, which only has setters",
    "_get_fsdp_state": "FSDP2: the settings of a unit",
    "_apply": "torch.nn.Module: give memory to parameters that have none, also to FSDP2's shards",
    "_partial_reduce_output": "FSDP2: sums of a host that a step given up leaves behind",
    "_states_to_backward_prefetch": "FSDP2: what a unit prefetches, which only has a setter",
    "_backward_hooks": (
        "torch.Tensor: hooks on a parameter's gradient, which act on the whole of it"
    ),
    "_backward_active_depth": "DeepSpeed ZeRO: whether a backward pass is under way",
    "_cache_enabled": "torch's parametrisations: whether passes share what they compute",
    "_cdata": "torch's storage: which tensors share memory",
    "_cat_file": "fsspec: a part of a file that is asked for now and read later",
    "_coalesce_grad_reduction": "DeepSpeed ZeRO: one reduction a step",
    "_config": "DeepSpeed: the settings that it has read",
    "_PartitionedParameterCoordinator__params_to_release": (
        "DeepSpeed ZeRO 3: parameters to give back"
    ),
    "_get_session": "aiobotocore: a session of aiohttp, which takes no settings from outside",
    "_hp_optimizer_states_linked": "DeepSpeed ZeRO: where the optimiser's state is",
    "_post_accumulate_grad_hooks": "torch.Tensor: hooks that act when a gradient was added up",
    "_lazy_init_hp_params_optimizer_state": (
        "DeepSpeed ZeRO: the optimiser's state before the first step"
    ),
    "_middlewares": (
        "aiohttp's session: bounds for the answers of S3, as `middlewares` gives them to other"
        " stores"
    ),
    "_release_process_group_references": "DeepSpeed: its process groups, at the end of a training",
    "_version": "torch.Tensor: whether a tensor was changed in place",
}
# of Python, in spite of their names
DOCUMENTED = {"_asdict", "_fields", "_replace", "_exit", "_current_frames"}


@pytest.mark.parametrize(("module", "name"), NAMES, ids=".".join)
def test_a_private_name_that_we_use_is_there(module, name):
    try:
        home, *arguments = (module, name) if name else module.rsplit(".", 1)
        reduce(getattr, arguments, import_module(home))
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{module}.{name} is gone, which we use for: {NAMES[module, name]} ({error})")


def test_every_private_name_that_we_use_stands_here():
    known_names = (
        {word for names in NAMES for name in names for word in name.split(".")}
        | set(ATTRIBUTES)
        | DOCUMENTED
    )
    used = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        used_names = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                used_names.add(node.target.id)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                used_names.add(node.attr)
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("distap"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            for name in names:
                if name.startswith("_") and not name.startswith("__") and name not in used_names:
                    used[name] = path.relative_to(PACKAGE)
    assert {name: place for name, place in used.items() if name not in known_names} == {}
    assert {name for name in ATTRIBUTES if name not in used} == set()
