"""The configuration of a training: a YAML recipe, checked key by key, with dotted overrides.

Each part has a closed section, explained where its fields are declared. What has no state (loss, sampling,
augmentation) is configured by the frozen dataclass that does the work, chosen by `name`.
"""

from distap.config.reading import load_recipe, recipe_from
from distap.config.recipe import Recipe
from distap.config.sections import RandomWeights

__all__ = ["RandomWeights", "Recipe", "load_recipe", "recipe_from"]
