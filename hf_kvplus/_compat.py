"""Every difference between the supported versions of transformers, and nothing else."""

import inspect
from typing import Any, NamedTuple

import transformers
from transformers import GenerationConfig, modeling_flash_attention_utils
from transformers.generation import configuration_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_chunked_causal_mask
from transformers.utils.output_capturing import _active_collector

#: Under which names a cache travels in model kwargs: `cache` since 5.24, before `past_key_values`, `cache_params`.
CACHE_KEYS = ("cache", "past_key_values", "cache_params")


def cache_key(model_kwargs: dict) -> str | None:
    """The name under which `model_kwargs` holds a cache, or `None`."""
    return next((key for key in CACHE_KEYS if model_kwargs.get(key) is not None), None)


def forward_cache_name(model) -> str:
    """The name of the cache argument of `model.forward`."""
    parameters = inspect.signature(model.forward).parameters
    return next((key for key in CACHE_KEYS if key in parameters), CACHE_KEYS[0])


def wants_attentions(kwargs: dict) -> bool:
    """Whether the caller of the model asked for attention weights (by argument, or through the output recorder)."""
    if kwargs.get("output_attentions"):
        return True
    collected = _active_collector.get()
    return collected is not None and any("attentions" in key for key in collected)


def takes_masks(module) -> bool:
    """Whether masks are made for the attention function that `module` asks for (for one of a user's own, or not)."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return implementation in ALL_MASK_ATTENTION_FUNCTIONS


def takes_slot_masks(attention) -> bool:
    """Whether one of transformers' attention functions applies a mask of ours; those of flash attention do not."""
    return "flash" not in str(attention.__module__)


def reads_for(function) -> object:
    """The function that reads the `**kwargs` of `function` where its code does not name it: flash attention's."""
    own = function is modeling_flash_attention_utils._flash_attention_forward
    return modeling_flash_attention_utils._process_flash_attention_kwargs if own else None


def makes_masks_of_steps(config) -> bool:
    """Whether `generate` can make the masks of a compileable cache: 5.17 fails where attention is chunked."""
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return not chunked or "block_sequence_ids" in inspect.signature(create_chunked_causal_mask).parameters


def mask_length(generation_config, model_kwargs: dict) -> int | None:
    """Tokens, past ones included, that the attention mask of `generate` spans; newer versions drop a mask of ones."""
    mask = model_kwargs.get("attention_mask")
    return getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]


def valid_strings() -> tuple[str, ...]:
    """What transformers itself accepts as `cache_implementation`."""
    return configuration_utils.ALL_CACHE_IMPLEMENTATIONS


class PrepareCall(NamedTuple):
    """What `_prepare_cache_for_generation` was called with, as far as we read it."""

    model: Any
    generation_config: GenerationConfig
    model_kwargs: dict
    generation_mode: Any
    max_cache_length: int


def prepare_call(method, args: tuple, kwargs: dict) -> PrepareCall | None:
    """The arguments of a call of `_prepare_cache_for_generation`, or `None` if they are not those of known versions.

    By the names in the signature of `method`; where a wrapper hides them, by the order that they always had.
    """
    try:
        named = inspect.signature(method).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    names = ("self", "generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length")
    named = {**dict(zip(names, args)), **kwargs, **named}
    if not named.keys() >= set(names):
        return None
    call = PrepareCall(*(named[name] for name in names if name != "batch_size"))
    known = isinstance(call.generation_config, GenerationConfig) and isinstance(call.model_kwargs, dict)
    return call if known and isinstance(call.max_cache_length, int) else None


def unknown_version(method: str) -> str:
    """What to tell where a version of transformers is not one that we know."""
    return (
        f"transformers {transformers.__version__} (or another library that patches it) changed `{method}`, which "
        "hf_kvplus hooks into. Install a version that README names as tested, or leave `cache_implementation` out."
    )
