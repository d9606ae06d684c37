from dataclasses import dataclass

import pytest
from raising import raises

from distap.errors import DistapError
from distap.registry import METHODS, REGISTRY, build_part, class_of, fields_in_source, fields_of


@dataclass(frozen=True)
class OfItsOwn:
    """A loss from outside that derives from nothing."""

    def value_and_gradient(self, gathered, budget):
        return None


@pytest.mark.parametrize(
    ("kind", "name", "options", "said"),
    [
        ("loss", "smoth_ap", {}, "loss 'smoth_ap' is unknown; did you mean smooth_ap?"),
        ("loss", "smooth_ap", {"tua": 1}, "loss smooth_ap: tua: unknown key; did you mean tau?"),
        (
            "loss",
            "ap_q",
            {"preset": "dirtorhc"},
            "loss ap_q has no preset 'dirtorhc'; did you mean dirtorch?",
        ),
        (
            "loss",
            "no_such_package.losses:Mine",
            {},
            "No module named 'no_such_package'; is its folder on PYTHONPATH",
        ),
        (
            "loss",
            "my_package.losses.Mine",
            {},
            "is unknown; expected one of ap_q, .*, or package.module:Class",
        ),
        ("loss", "torch.nn:Mine", {}, "the module torch.nn has no Mine"),
        ("loss", "torch.nn:Linear", {}, "expected a dataclass or a pydantic model, .*@distap.loss"),
        (
            "loss",
            f"{__name__}:OfItsOwn",
            {},
            r"a loss has to be a subclass of distap\.ranking\.loss\.Loss, which Of",
        ),
        (
            "sampling",
            "plug_ins:NoCheck",
            {},
            "a sampling needs a method 'check', which NoCheck has",
        ),
    ],
)
def test_what_is_wrong_with_a_name_or_a_key_is_said(kind, name, options, said):
    with pytest.raises(DistapError, match=said.replace("?", r"\?")):
        build_part(kind, name, **options)


def test_what_fails_within_a_module_is_not_taken_for_a_name_that_it_lacks(tmp_path, monkeypatch):
    (tmp_path / "fails_on_import.py").write_text("import torch\n\ntorch.no_such_function()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="no_such_function"):
        class_of("loss", "fails_on_import:Mine")


def test_a_function_that_takes_other_parameters_is_named_with_its_line(tmp_path, monkeypatch):
    text = "import distap\n\n\n@distap.loss\ndef mine(scores, classes):\n    return scores\n"
    (tmp_path / "wrong_names.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with raises("loss.wrong_parameters", "wrong_names.py, line 4: mine", "similarities"):
        class_of("loss", "wrong_names:mine")


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in REGISTRY for name in REGISTRY[kind]]
)
def test_every_line_of_the_table_names_a_class_that_is_there(kind, name):
    assert all(callable(getattr(class_of(kind, name), method)) for method in METHODS[kind])
    assert sorted(fields_in_source(REGISTRY[kind][name])) == sorted(fields_of(class_of(kind, name)))
