"""Cache strings ⇄ what they mean: `[offloaded_][retention_]paged_format`."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CacheConfigError, invalid, nearest
from .formats import FORMATS, FormatChoice, choose, option_names
from .placement import PLACEMENTS, Placement, Resident
from .retention import RETENTIONS, Retention

PAGE_SIZES = (8, 16, 32, 64, 128, 256)

#: Strings of third parties: `factory(config, **cache_config)` returns a `transformers.Cache`.
FACTORIES: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class CacheSpec:
    """A composition that a layer can be built from: one value from each of the three tables, and the page size."""

    format: str | FormatChoice = "native"
    retention: Retention | None = None
    placement: Placement = dataclasses.field(default_factory=Resident)
    page_size: int = 64
    reserve: int | None = None

    @property
    def has_fixed_step(self) -> bool:
        """Whether a step can run without the host: pages stay where they are, and no policy has to be asked."""
        return self.placement.in_place and (self.retention is None or self.retention.fixed)

    def __post_init__(self) -> None:
        if not isinstance(self.format, FormatChoice):
            object.__setattr__(self, "format", choose(self.format, {}))
        if self.page_size not in PAGE_SIZES or type(self.page_size) is not int:
            raise invalid("page_size", self.page_size, f"one of {', '.join(map(str, PAGE_SIZES))}")
        if self.retention is not None and not isinstance(self.retention, Retention):
            raise invalid("retention", self.retention, "None, a `Retention`, or " + ", ".join(RETENTIONS))
        if not isinstance(self.placement, Placement):
            raise invalid("placement", self.placement, "None, a `Placement`, or " + ", ".join(PLACEMENTS))
        if self.reserve is not None:
            check_reserve(self.reserve, self)


def check_reserve(tokens: Any, spec: CacheSpec) -> None:
    """Raise if `spec` cannot have room for `tokens` reserved."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise invalid("reserve", tokens, "a whole number of tokens from 1, or None")
    if not spec.has_fixed_step:
        raise CacheConfigError(
            f"`reserve`: got {tokens} with {spec.retention or spec.placement}, which decides on the host at every "
            "step. Accepted: strings that keep all tokens or a sliding window, not offloaded. Leave `reserve` out."
        )


def names() -> tuple[str, ...]:
    """Every string that is accepted now, ours and those of third parties."""
    return tuple(
        "_".join(part for part in (placement, retention, "paged", format) if part)
        for placement in ("", *PLACEMENTS)
        for retention in ("", *RETENTIONS)
        for format in FORMATS
    ) + tuple(FACTORIES)


def available() -> dict[str, str]:
    """Every cache string, with one line that says what it does."""
    lines = {}
    for name in names():
        if name in FACTORIES:
            lines[name] = _first_line(FACTORIES[name])
            continue
        placement, retention, format = _split(name)
        parts = [FORMATS[format].summary]
        parts += [_first_line(RETENTIONS[retention])] if retention else []
        parts += [_first_line(PLACEMENTS[placement])] if placement else []
        lines[name] = "; ".join(part.rstrip(".") for part in parts)
    return lines


def parse(name: str, cache_config: Mapping[str, Any] | None = None) -> CacheSpec:
    """What a string and its `cache_config` ask for.

    Raises:
        CacheConfigError: an unknown string, key or value, with what is accepted and the nearest spelling.
    """
    if name not in names() or name in FACTORIES:
        raise unknown_string(name)
    placement, retention, format = _split(name)
    return compose(format, retention or None, placement or None, cache_config or {}, context=f" with {name!r}")


def compose(format: str, retention, placement, options: Mapping[str, Any], context: str = "") -> CacheSpec:
    """A spec from names or objects, with each option handed to the part that has a field of that name."""
    if not isinstance(options, Mapping):
        raise invalid("cache_config", options, "a dict")
    if not isinstance(format, str) or format not in FORMATS:
        raise invalid("format", format, FORMATS)
    owners = {
        "retention": _lookup("retention", retention, RETENTIONS, Retention),
        "placement": _lookup("placement", placement, PLACEMENTS, Placement),
    }
    fields = {name: _field_names(owner) for name, owner in owners.items()}
    accepted = ["page_size", "reserve", *fields["retention"], *fields["placement"], *option_names(format, options)]
    for key in options:
        if key not in accepted:
            raise CacheConfigError(
                f"`cache_config`: got the key {key!r}{context}, accepted: {', '.join(accepted)}."
                f"{nearest(key, accepted)}{_owner_of(key)}"
            )
    built = {
        part: owner(**{key: options[key] for key in fields[part] if key in options})
        if isinstance(owner, type)
        else owner
        for part, owner in owners.items()
    }
    built["placement"] = built["placement"] or Resident()
    built |= {key: options[key] for key in ("page_size", "reserve") if key in options}
    return CacheSpec(format=choose(format, options), **built)


def unknown_string(name: object) -> CacheConfigError:
    return CacheConfigError(
        f"`cache_implementation`: got {name!r}, accepted: [offloaded_][{'|'.join(RETENTIONS)}_]paged_"
        f"[{'|'.join(FORMATS)}], as in 'offloaded_sliding_paged_int8'.{nearest(name, names())} "
        "`hf_kvplus.available()` lists them all."
    )


def _split(name: str) -> tuple[str, str, str]:
    """Placement, retention and format of one of our strings; the first two may be empty."""
    before, _, format = name.partition("paged_")
    before = before.rstrip("_")
    placement = next((p for p in PLACEMENTS if before == p or before.startswith(f"{p}_")), "")
    return placement, before[len(placement) :].lstrip("_"), format


def _lookup(argument: str, given, table: Mapping[str, type], base: type):
    """The class that a name stands for, or the object that was given."""
    if isinstance(given, str):
        if given not in table:
            raise invalid(argument, given, table)
        return table[given]
    if given is None or isinstance(given, base) or (isinstance(given, type) and issubclass(given, base)):
        return given
    raise invalid(argument, given, f"None, a `{base.__name__}`, or one of {', '.join(table)}")


def _field_names(owner) -> list[str]:
    """The options that a class takes; an object that was given is complete and takes none."""
    return [field.name for field in dataclasses.fields(owner)] if isinstance(owner, type) else []


def _owner_of(key: str) -> str:
    """A clause that says which part of a string would accept `key`."""
    for table in (RETENTIONS, PLACEMENTS):
        holders = [name for name, owner in table.items() if key in _field_names(owner)]
        if holders:
            return f" {key!r} belongs to strings with {' or '.join(f'{name}_' for name in holders)}."
    holders = [name for name, spec in FORMATS.items() if key in spec.options]
    return f" {key!r} belongs to the formats {', '.join(holders)}." if holders else ""


def _first_line(documented) -> str:
    return (documented.__doc__ or "").strip().split("\n")[0]
