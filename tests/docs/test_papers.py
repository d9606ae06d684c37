"""docs/papers/ names every value of every recipe that changes a figure, and no other."""

import re
from collections import Counter
from fnmatch import filter as matching

import pytest
import timm
import yaml
from braceexpand import braceexpand
from launching import ROOT

from distap.config.reading import RECIPES, load_recipe
from distap.data.converters import DATASETS
from distap.registry import REGISTRY, by_path

PAPERS = ROOT / "docs/papers.md"
PAGES = sorted((ROOT / "docs/papers").glob("*.md"))
# Recipes whose sets have no converter, and what they pack first.
PACKED = {
    "megaloc": "sf-xl.csv shards/sf-xl",
    "arcface-webface42m": "webface42m shards/webface42m",
}
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem != "emoji")


def documented():
    """(recipe, key, value) of the tables: a row has recipes or patterns of them, values and a
    source.
    """
    for section in "".join(page.read_text() for page in PAGES).split("\n## "):
        group = re.search(r"^Recipes: (.*?)\.$", section, re.MULTILINE | re.DOTALL)
        if group:
            names = [
                name
                for pattern in re.findall(r"`(.+?)`", group[1])
                for name in matching(NAMES, pattern)
            ]
            for patterns, values, source in re.findall(
                r"^\| (all|`.+?`) \| (.+) \| (.+?) \|$", section, re.MULTILINE
            ):
                assert source.strip()
                for pattern in ["*"] if patterns == "all" else re.findall(r"`(.+?)`", patterns):
                    assert matching(names, pattern), f"{pattern} is none of the section's recipes"
                    for name in matching(names, pattern):
                        for keys, value in re.findall(r"`([a-z0-9_.{},]+): (.+?)`", values):
                            for key in braceexpand(keys):
                                yield name, key, yaml.safe_load(value)


def head_of(name):
    """The comments of a recipe, such as paper, data and expected."""
    return dict(
        re.findall(r"^# (\w+): (.*)$", (RECIPES / f"{name}.yaml").read_text(), re.MULTILINE)
    )


def values_of(name):
    """Settings of a recipe but for those that the page says its tables leave out."""
    settings = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    settings.pop("run")  # runs/NAME
    (named,) = re.findall(
        r"leave out the keys (.*?), which change no figure", PAPERS.read_text(), re.DOTALL
    )
    data = f"data/{head_of(name)['data']}"
    implied = {"data.train": f"{data}/train", "data.validation": f"{data}/test"}
    implied |= {"data.augmentation.name": "torchvision"}
    values = dict(by_path(settings, "."))
    return {
        key: values[key]
        for key in values
        if f"`{key}`" not in named and implied.get(key) != values[key]
    }


def test_the_tables_hold_the_values_of_the_recipes_and_a_source_for_each():
    rows = list(documented())
    assert not [
        row for row, count in Counter((name, key) for name, key, _ in rows).items() if count > 1
    ]
    for name in NAMES:
        assert {key: value for recipe, key, value in rows if recipe == name} == values_of(name)


def test_the_recipes_that_choose_names_have_its_losses_backbones_batches_and_memory():
    rows = re.findall(
        r"^\| .+ \| `([\w-]+)` \| ([\d,]+) \| ([\d.]+) \| (.+) \| `(.+)` \|$",
        (ROOT / "docs/choose.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 8
    for name, batch, gigabytes, losses, backbone in rows:
        settings = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
        loss = settings["loss"]
        drawn = settings["sampling"]
        named = loss if isinstance(loss, dict) and "name" not in loss else [loss["name"]]
        assert re.findall(r"`(\w+)`", losses) == list(named)
        assert backbone == settings["model"]["backbone"].partition(".")[0]
        drawn = drawn.get("batch_size") or drawn["classes"] * drawn["images"]
        assert int(batch.replace(",", "")) == drawn
        assert head_of(name)["memory"].startswith(f"{gigabytes} GB")


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is_and_names_what_exists(name):
    text = (RECIPES / f"{name}.yaml").read_text()
    head = head_of(name)
    settings = yaml.safe_load(text)
    assert head.keys() >= {"paper", "data", "expected", "memory"}
    assert f"distap train {name} " in text and settings["run"] == f"runs/{name}"
    has_own_weights = "weights" in settings["model"]
    assert settings["model"]["backbone"] in (
        timm.list_models() if has_own_weights else timm.list_pretrained()
    )
    if name.endswith("-own"):
        assert (
            "distap data pack photos shards --split" in text
            and settings["data"]["train"] == "shards/train"
        )
        assert settings["data"]["validation"] == "shards/validation"  # as --split names it
        return
    sets = load_recipe(RECIPES / f"{name}.yaml").data
    named = [*map(str, sets.train_sources.values()), *map(str, sets.validation_sets.values())]
    if name in PACKED:
        assert [place for place in named if f"{place.removeprefix('shards/')}" not in text] == []
        assert f"distap data pack {PACKED[name]}" in text
        return
    datasets = head["data"].split(", ")
    for dataset in datasets:
        assert f"distap data convert {dataset} SOURCE data/{dataset}" in text
    for place in [*named, *([sets.gallery] if sets.gallery else [])]:
        dataset, split = re.sub(r"^(data|described:[\w-]+)/", "", place).split("/")
        assert dataset in datasets and split in {item.name for item in DATASETS[dataset].splits}


def test_the_references_have_an_entry_for_each_loss_and_data_set_and_a_row_for_each_entry():
    text = (ROOT / "docs/reference/references.md").read_text()
    tables, bibtex = text.split("\n## BibTeX\n")
    entries = re.findall(r"^@\w+\{(\w+),$", bibtex, re.MULTILINE)
    rows = re.findall(r"^\| (.+) \| (.+) \|$", tables, re.MULTILINE)
    named = {name for subject, _ in rows for name in re.findall(r"`([\w*-]+)`", subject)}
    cited = {key for _, cell in rows for key in re.findall(r"`([a-z]+\d{4}[a-z]*)`", cell)}
    assert max(Counter(entries).values()) == 1 and set(entries) == cited
    assert set(REGISTRY["loss"]) - named == {"sum"}
    assert [name for name in DATASETS if not any(matching([name], one) for one in named)] == []
