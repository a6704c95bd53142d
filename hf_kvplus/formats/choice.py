"""Which format the keys and the values of each layer are written in."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import invalid
from .base import FORMATS, FormatSpec

_CHOICES = ("k_format", "v_format", "format_by_layer")


@dataclass(frozen=True)
class FormatChoice:
    """A format for all layers, and exceptions from it.

    Args:
        format: the name of a format.
        k_format, v_format: formats of the keys and of the values, where they are not those of `format`.
        format_by_layer: `{layer: format}` for layers that differ. A layer is a whole number, from the end if negative,
            or a string of one (a saved config turns numbers into strings).
        options: options of the formats named, such as `rotation`, `residual` or `native_pages`.

    Raises:
        CacheConfigError: a name or a value that is not accepted.
        ImportError: a library that a format needs is not installed.
    """

    format: str = "native"
    k_format: str | None = None
    v_format: str | None = None
    format_by_layer: Mapping[int | str, str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        by_layer = self.format_by_layer or {}
        if not isinstance(by_layer, Mapping):
            raise invalid("format_by_layer", by_layer, "a dict such as {0: 'native', -1: 'int8'}")
        numbered = {_number(layer): name for layer, name in by_layer.items()}
        if len(numbered) < len(by_layer):
            raise invalid("format_by_layer", by_layer, "every layer once")
        keys, values = (
            _spec(argument, self.format if name is None else name, self.options)
            for argument, name in (("k_format", self.k_format), ("v_format", self.v_format))
        )
        spec = _spec("format", self.format, self.options)
        if self.k_format is not None or self.v_format is not None:
            counts = {name: max(getattr(keys, name), getattr(values, name)) for name in ("residual", "native_pages")}
            spec = replace(spec, key=keys.key, value=values.value, **counts)
        named = {layer: _spec("format_by_layer", name, self.options) for layer, name in numbered.items()}
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "_by_layer", named)

    def __repr__(self) -> str:
        given = {name: getattr(self, name) for name in _CHOICES if getattr(self, name) is not None} | dict(self.options)
        return repr(self.format) + (f" with {given}" if given else "")

    def of(self, layers: int) -> list[FormatSpec]:
        """The format of each of a model's `layers` layers."""
        specs = [self.spec] * layers
        for layer, spec in self._by_layer.items():
            if not -layers <= layer < layers:
                raise invalid("format_by_layer", layer, f"layers from {-layers} to {layers - 1}")
            if {layer, layer % layers - layers, layer % layers} & self._by_layer.keys() != {layer}:
                raise invalid(
                    "format_by_layer", dict(self.format_by_layer), f"every layer once; {layer} is named twice"
                )
            specs[layer] = spec
        return specs


def option_names(format: str, options: Mapping[str, Any]) -> list[str]:
    """What `options` may say about formats, given those that `format` and it name."""
    by_layer = options.get("format_by_layer")
    named = [format, options.get("k_format"), options.get("v_format")]
    named += by_layer.values() if isinstance(by_layer, Mapping) else []
    specs = [FORMATS[name] for name in named if isinstance(name, str) and name in FORMATS]
    return [*_CHOICES, "residual", "native_pages", *dict.fromkeys(name for spec in specs for name in spec.options)]


def choose(format: str, options: Mapping[str, Any]) -> FormatChoice:
    """The choice that `format` and the entries of `options` called by `option_names` make."""
    chosen = {name: options[name] for name in _CHOICES if name in options}
    others = {name: options[name] for name in option_names(format, options) if name in options and name not in chosen}
    return FormatChoice(format, **chosen, options=others)


def _spec(argument: str, name: object, options: Mapping[str, Any]) -> FormatSpec:
    if not isinstance(name, str) or name not in FORMATS:
        raise invalid(argument, name, FORMATS)
    return FORMATS[name].with_options(**options)


def _number(layer: object) -> int:
    try:
        if isinstance(layer, (int, str)) and not isinstance(layer, bool):
            return int(layer)
    except ValueError:
        pass
    raise invalid("format_by_layer", layer, "whole numbers of layers, such as 0 or -1, as its keys")
