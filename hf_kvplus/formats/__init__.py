"""How a sealed page is written. One file per family; each file registers its formats by name.

To add a format: put a module in this folder that defines `PageFormat` subclasses and calls `register_format`.
"""

import importlib
import pkgutil

from .base import FORMATS, FormatSpec, PageFormat, register_format
from .choice import FormatChoice, choose, option_names

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["FORMATS", "FormatChoice", "FormatSpec", "PageFormat", "choose", "option_names", "register_format"]
