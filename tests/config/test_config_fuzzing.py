"""Configurations that someone else wrote: whatever is in them, a message names the culprit, and no
code runs.
"""

import re

import pytest
import torch
import yaml
from evil import Evil
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raising import raises

from distap.config.reading import load_recipe
from distap.config.recipe import Recipe
from distap.errors import DistapError
from distap.model.weights import read_state
from docs.recipe_keys import recipe_keys

VALID = {
    "run": "runs/x",
    "steps": 10,
    "data": {"train": "shards", "augmentation": {"crop": 0.5}},
    "sampling": {"name": "p_by_k", "classes": 5, "images": 4},
    "loss": {"sup_ap": 0.5, "calibration": {"weight": 0.5}},
    "model": {"weights": {"name": "random"}},
    "optimizer": {"learning_rate": 1e-4},
}
SECTIONS = sorted(Recipe.model_fields)
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_subnormal=False)
    | st.text(max_size=20)
)
names = st.text(max_size=8) | st.integers() | st.booleans()
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(SECTIONS) | st.text(max_size=8)
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quick
@given(
    st.sampled_from([None, *(name for name in VALID if isinstance(VALID[name], dict))]),
    keys,
    values,
)
def test_any_settings_are_read_or_refused_by_name(section, key, value):
    changes = {key: value} if section is None else {section: {**VALID[section], key: value}}
    try:
        load_recipe({**VALID, **changes}, where="the recipe")
    except DistapError as error:
        assert str(error).startswith("the recipe: ") and (section or "") in str(error)


def test_a_wrong_value_of_any_key_is_told_in_the_words_of_a_recipe():
    """Not in those of pydantic and Python, which name classes and types."""
    message = []
    for key in recipe_keys():
        *sections, last = key.path.replace("NAME", "mine").split(".")
        for value in ("wrong", [1, "x"], {"odd": 1}, -1e9, True):
            recipe = {"run": "runs/x", "steps": 10, "data": {"train": "shards"}}
            place = recipe
            for section in sections:
                place = place.setdefault(section, {})
            if key.of and last != "name":
                place["name"] = key.of.partition(",")[0]
            place[last] = value
            try:
                load_recipe(recipe)
            except DistapError as error:
                message += str(error).split("\n")
    assert len(message) > 1000 and all(line.startswith("recipe: ") for line in message)
    raw = re.compile(r"Input|valid |dictionary|instance of|pattern|pydantic|<class| at 0x|__")
    assert [line for line in message if raw.search(line)] == []


@quick
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_read_or_refused_by_name(tmp_path, content):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(DistapError, match=r"recipe\.yaml"):
        load_recipe(path)


@pytest.mark.parametrize(
    "value", ["!!python/object/apply:os.mkdir [{path}]", "!!python/name:os.mkdir"]
)
def test_a_tag_in_a_recipe_or_an_override_runs_no_code(tmp_path, value):
    evil = tmp_path / "evil"
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(VALID) + f"seed: {value.format(path=evil)}\n")
    with raises("recipe.not_yaml", "recipe.yaml", "YAML"):
        load_recipe(path)
    path.write_text(yaml.safe_dump(VALID))
    with raises("recipe.not_yaml", "YAML"):
        load_recipe(path, [f"seed={value.format(path=evil)}"])
    assert not evil.exists()


def test_aliases_which_may_stand_for_billions_of_values_are_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(VALID) + "\n".join(lines) + "\n")
    with raises("recipe.not_yaml", "recipe.yaml", "YAML"):
        load_recipe(path)


def test_evil_weights_run_no_code(tmp_path):
    torch.save({"stem.weight": Evil(open, str(tmp_path / "evil"), "w")}, tmp_path / "weights.pt")
    with raises("weights.unreadable", "weights.pt"):
        read_state(tmp_path / "weights.pt")
    assert not (tmp_path / "evil").exists()
