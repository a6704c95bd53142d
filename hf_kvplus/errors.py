"""Errors that say which argument was wrong, what was given, what is accepted, and what to do."""

import difflib
from collections.abc import Iterable


class CacheConfigError(ValueError):
    """A cache string, a `cache_config` entry or a combination of them that cannot be served."""


class UnsupportedModelError(ValueError):
    """A model, or a way of calling it, that the chosen cache cannot serve without giving wrong tokens."""


def nearest(given: object, accepted: Iterable[str]) -> str:
    """A clause naming the accepted spelling closest to `given`, or an empty string."""
    accepted, words = list(accepted), sorted(str(given).split("_"))
    match = [name for name in accepted if sorted(name.split("_")) == words]  # the right words in another order
    match = match or difflib.get_close_matches(str(given), accepted, n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else ""


def invalid(argument: str, given: object, accepted: str | Iterable[str]) -> CacheConfigError:
    """The error for an argument whose value is not among those accepted."""
    if isinstance(accepted, str):
        return CacheConfigError(f"`{argument}`: got {given!r}, accepted: {accepted}.")
    names = list(accepted)
    return CacheConfigError(f"`{argument}`: got {given!r}, accepted: {', '.join(names)}.{nearest(given, names)}")
