"""Every hook into transformers, and nothing else: seven methods, left again by `unregister()`.

- `GenerationConfig` accepts the strings (its own list stays as it is, for models that copy it and build caches of their
  own), and a misspelt one is told its nearest neighbour.
- `generate` builds its cache as ever, for "dynamic"; then its attention layers become pages. A model that never asks
  for that cache is refused (`generation.py`).
- After every forward pass it is still that cache which holds the tokens (`keeping.py`).
- Attention functions are preceded by one test: is the key a stand-in?
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import AttentionInterface

from . import _compat, generation, hooks, keeping, registry
from .attention import precede
from .errors import UnsupportedModelError, invalid, nearest
from .functions import PRECEDED


def register() -> None:
    """Make transformers know our strings and caches. Importing hf_kvplus does this; once more changes nothing."""
    for owner, name, serve in _HOOKS:
        if name in vars(owner):
            hooks.put(owner, name, serve)
    if missing := _missing():
        warnings.warn(f"hf_kvplus: {missing}", stacklevel=2)


def unregister() -> None:
    """Leave transformers as it was before `register()`, but for what others have put over our hooks since."""
    hooks.remove_all()


def _missing() -> str | None:
    """What to tell if this version of transformers does not have a method that is hooked into."""
    absent = next((f"{owner.__name__}.{name}" for owner, name, _ in _HOOKS if name not in vars(owner)), None)
    return absent and _compat.unknown_version(absent)


def register_cache_implementation(name: str, factory: Callable[..., Any]) -> None:
    """Let `generate(cache_implementation=name)` use a cache of your own.

    Args:
        name: the string. Not one of transformers' or of ours.
        factory: called as `factory(config, **cache_config)` with the decoder's config; returns a `transformers.Cache`.
    """
    taken = (set(registry.names()) - set(registry.FACTORIES)) | {"paged", *_compat.valid_strings()}
    if not isinstance(name, str) or name in taken:
        raise invalid("name", name, "a string that neither transformers nor hf_kvplus uses")
    if not callable(factory):
        raise invalid("factory", factory, "a function of (config, **cache_config) that returns a Cache")
    registry.FACTORIES[name] = factory


def _validate(original, self, *args, **kwargs):
    given, ours, theirs = self.cache_implementation, registry.names(), ("paged", *_compat.valid_strings())
    if given in ours:
        if missing := _missing():
            raise UnsupportedModelError(f"`cache_implementation`: {given!r}: {missing}")
        self = copy.copy(self)
        self.cache_implementation = "dynamic"
    elif isinstance(given, str) and given not in theirs:
        meant = nearest(given, ours + theirs)
        if "paged_" in given or (meant and meant == nearest(given, ours)):
            raise registry.unknown_string(given)
    return original(self, *args, **kwargs)


def _get_interface(original, *args, **kwargs):
    inner = original(*args, **kwargs)
    if type(inner).__hash__ is None:
        return precede(inner)
    if inner not in PRECEDED:  # no `functools.cache`: torch.compile warns of those
        PRECEDED[inner] = precede(inner)
    return PRECEDED[inner]


#: What is hooked into: the class, the name of its method, and what answers.
_HOOKS = (
    (GenerationConfig, "validate", _validate),
    (GenerationMixin, "_validate_generation_mode", generation.validate_mode),
    (GenerationMixin, "_prepare_static_cache", generation.prepare_static),
    (GenerationMixin, generation.PREPARE, generation.prepare_cache),
    (GenerationMixin, "_prefill", keeping.prefill),
    (GenerationMixin, "_update_model_kwargs_for_generation", keeping.update_model_kwargs),
    (AttentionInterface, "get_interface", _get_interface),
)
