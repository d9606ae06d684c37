"""What the server of `ranks.server` does once for all its forks: imports, and reading what a recipe
may say.
"""

from importlib import import_module

from PIL import Image
from small_trainings import recipe

LATER = (
    "distap.processes.agent",
    "fsspec.implementations.local",
    "numpy.ctypeslib",
    "pillow_heif",
    "timm.optim",
)
for name in LATER:
    import_module(name)
recipe("run", ("none",))
Image.preinit()
