"""What `distap tune` searches: a YAML file with values by recipe key, as Optuna takes them."""

from collections.abc import Callable, Mapping
from typing import Any

import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from distap.apps.advice import HELD_OUT, RECIPE_TEMPLATES
from distap.config.reading import changed_settings, load_recipe, parsed_yaml
from distap.config.recipe import Recipe
from distap.data.shards.index import Index
from distap.errors import DistapError
from distap.registry import name_of

BATCHES, IMAGES_A_CLASS = (32, 64, 128, 256), (2, 4, 8)
Space = dict[str, BaseDistribution]  # by recipe key; choices are YAML


def default_space(recipe: Recipe, index: Index) -> str:
    """Return YAML with what is searched by default."""
    side = recipe.data.image_size
    batches = [(size // images, images) for size in BATCHES for images in IMAGES_A_CLASS]
    return RECIPE_TEMPLATES.get_template("space.yaml").render(
        rate=recipe.optimizer.learning_rate,
        batches=[each for each in batches if each[0] <= (1 - HELD_OUT) * index.classes.most(each[1])],
        sizes=sorted({max(32, round(side * 2 / 3 / 32) * 32), side}),
        is_pretrained=name_of("weights", recipe.model.weights) != "random",
    )


def parsed_space(text: str, file: str, settings: dict[str, Any], own: Callable[[str], Any]) -> Space:
    """Parse what to search by recipe key; the value that `own` gives for a key joins each list.

    Raises:
        DistapError: a key or a value does not fit the recipe's settings.
    """
    given, found = parsed_yaml(text, file), Space()
    if not isinstance(given, Mapping) or not given:
        raise DistapError(f"{file}: expected recipe keys, each with a list of values or with low and high")
    for key, values in given.items():
        try:
            if isinstance(values, list) and values:
                more = [] if own(key) in values else [own(key)]
                found[key] = CategoricalDistribution([*map(as_yaml, values + more)])
            else:  # numbers such as 1e-5 are text in YAML
                ends = {end: float(values[end]) for end in ("low", "high")}
                found[key] = FloatDistribution(**{**values, **ends})
        except (TypeError, ValueError, KeyError) as error:
            raise DistapError(f"{file}: {key}: {error}; expected a list, or low, high and perhaps log") from error
        for value in values if isinstance(values, list) else ends.values():
            load_recipe(changed_settings(settings, [f"{key}={as_yaml(value)}"]), where=file)
    return found


def as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
