"""Which tokens stay. One file per policy; each file registers its policy by name.

To add a policy: put a module in this folder that subclasses `Retention`, overrides `select`, and calls
`register_retention`.
"""

import importlib
import pkgutil

from .base import RETENTIONS, LayerState, Retention, register_retention

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["RETENTIONS", "LayerState", "Retention", "register_retention"]
