"""Everything that a recipe chooses by name, and the construction of objects from names.

The table of names is `table.py`.
"""

from distap.registry.classes import WAY_TO_TRUST as WAY_TO_TRUST
from distap.registry.classes import adapter_of as adapter_of
from distap.registry.classes import class_of as class_of
from distap.registry.classes import fields_in_source as fields_in_source
from distap.registry.classes import fields_of as fields_of
from distap.registry.classes import name_of as name_of
from distap.registry.classes import place_of as place_of
from distap.registry.parts import Builds as Builds
from distap.registry.parts import Chosen as Chosen
from distap.registry.parts import Part as Part
from distap.registry.parts import build_part as build_part
from distap.registry.parts import build_recorded as build_recorded
from distap.registry.parts import builds_recorded as builds_recorded
from distap.registry.parts import by_path as by_path
from distap.registry.parts import sum_in_full as sum_in_full
from distap.registry.parts import value_of as value_of
from distap.registry.table import GIVEN as GIVEN
from distap.registry.table import METHODS as METHODS
from distap.registry.table import REGISTRY as REGISTRY
from distap.registry.table import SOURCES as SOURCES
