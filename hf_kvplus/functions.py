"""Attention functions: which compute what transformers' own do, what they read, and what those around them hand on."""

import ast
import functools
import inspect
import textwrap
import types
import warnings
from collections.abc import Callable

import torch

from . import _compat
from .errors import invalid

#: What the fused path computes with, by the names that transformers gives it.
HONOURED = {"scaling", "softcap", "s_aux", "sliding_window", "is_causal", "dropout", "position_bias"}
#: What functions read, but not to compute anything else with from tokens of the past.
_WITHOUT_EFFECT = {"output_attentions", "position_ids", "cache_position", "kernel_options"}
_WITHOUT_EFFECT |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "layer_idx"}
#: What models hand to every attention function. Of others, one whose code cannot be read may read anything.
_PASSED_ALONG = {"cache", "past_key_values", "use_cache", "kwargs", "output_hidden_states", "return_dict"}
_PASSED_ALONG |= {"token_type_ids", "mm_token_type_ids", "logits_to_keep", "output_router_logits", "num_items_in_batch"}
#: Attributes of the module that some functions read in the place of an argument.
_READ_FROM_MODULE = {"sinks": "s_aux"}

#: What transformers gets in the place of an attention function that it asks for.
PRECEDED: dict[Callable, Callable] = {}

_declared: list[Callable] = []
_mentions: dict[Callable, frozenset[str] | None] = {}
_told: set[tuple[str, str]] = set()


def treat_as_standard(function: Callable) -> Callable:
    """Declare that an attention function computes what those of transformers compute, so that pages can be read.

    That is `softmax(query @ keys.T * scaling + mask) @ values`, where `softcap`, `position_bias`, `is_causal`,
    `sliding_window` and learned sinks (`s_aux`) mean what they mean there, and no other argument matters. With a paged
    cache such a function is not called when tokens are decoded: attention reads the pages in its place.

    Args:
        function: the function, as it stands in `transformers.AttentionInterface` (also as a decorator).

    Returns:
        `function`.

    Raises:
        CacheConfigError: it cannot be called.
    """
    if not callable(function):
        raise invalid("function", function, "an attention function, as `AttentionInterface.register` takes it")
    inner = next((inner for inner, preceded in PRECEDED.items() if preceded is function), function)
    if not is_declared(inner):
        _declared.append(inner)
    return function


def is_declared(function: Callable) -> bool:
    return any(each is function for each in _declared)


def is_standard(function: Callable) -> bool:
    """Whether `function` is one of transformers' own, or declared to compute the same."""
    return (getattr(function, "__module__", None) or "").startswith("transformers.") or is_declared(function)


def heard(function: Callable, kwargs: dict) -> tuple[dict, set[str]]:
    """Of the arguments of a call: those that the fused path computes with, and names of others that `function` reads.

    What a function does not read has no effect there, whatever it is called, so it has none here.
    """
    given = {name: value for name, value in kwargs.items() if value is not None and reads(function, name)}
    honoured = {name: value for name, value in given.items() if name in HONOURED}
    return honoured, given.keys() - HONOURED - _WITHOUT_EFFECT


@torch.compiler.assume_constant_result
def reads(function: Callable, name: str) -> bool:
    """Whether `function` may read an argument of this name."""
    if is_declared(function):
        return name in HONOURED
    words = mentions(function)
    return name not in _PASSED_ALONG if words is None else name in words


def gives_weights(function: Callable) -> bool:
    """Whether `function` may give attention weights back; the general ones of transformers have none to give."""
    return not (getattr(function, "__module__", None) or "").startswith("transformers.integrations.")


def names_behind_mask(function: Callable) -> list[str]:
    """The parameters of an attention function that follow module, query, key, value and mask."""
    return list(inspect.signature(function).parameters)[5:]


def mentions(function: Callable) -> frozenset[str] | None:
    """Names of all arguments that `function` may read, by its code; `None` where that does not tell."""
    if isinstance(function, functools.partial):
        return mentions(function.func)
    if not isinstance(function, types.FunctionType):
        return None
    if function not in _mentions:
        _mentions[function] = _mentioned(function)
    return _mentions[function]


def _mentioned(function: types.FunctionType) -> frozenset[str] | None:
    """Its parameters, and each word that could be the name of one: strings, attributes, and what `**kwargs` go to."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    names = {each.arg for each in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)}
    rest, understood = tree.args.kwarg and tree.args.kwarg.arg, set()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(word)):
                names.add(word)
            case ast.Call(func=ast.Attribute(value=source, attr="get" | "pop"), args=[ast.Constant(), *_]):
                understood.add(source)
            case ast.Subscript(value=source, slice=ast.Constant()):
                understood.add(source)
            case ast.Compare(left=ast.Constant(), comparators=[source]):
                understood.add(source)
            case ast.Call(func=ast.Name(id=callee), keywords=keywords):
                for source in (each.value for each in keywords if each.arg is None and _is_name(each.value, rest)):
                    handed_on = mentions(_compat.reads_for(function) or _named(callee, inspect.unwrap(function)))
                    if handed_on is not None:
                        names |= handed_on
                        understood.add(source)
        if isinstance(node, ast.Attribute):
            names |= {node.attr, _READ_FROM_MODULE.get(node.attr, node.attr)}
    if any(_is_name(node, rest) and node not in understood for node in ast.walk(tree)):
        return None
    return frozenset(names)


def _is_name(node: ast.AST, name: str | None) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _named(name: str, function: types.FunctionType):
    """What a name in the code of `function` stands for."""
    return {**function.__globals__, **dict(zip(function.__code__.co_freevars, _contents(function)))}.get(name)


# --- wrappers ---------------------------------------------------------------------------------------------------------


def around(wrapper: Callable, precede: Callable[[Callable], Callable]) -> Callable | None:
    """The same wrapper around `precede(function)` for every attention function of transformers that it holds.

    A partial holds its function, a closure what it has in its cells, both to any depth. `None`: it holds none.
    """
    if isinstance(wrapper, functools.partial):
        return functools.partial(precede(wrapper.func), *wrapper.args, **wrapper.keywords) if _holds(wrapper) else None
    if not isinstance(wrapper, types.FunctionType) or is_standard(wrapper) or not _holds(wrapper):
        return None
    cells = tuple(
        types.CellType(precede(held)) if held is not None and _holds(held) else cell
        for cell, held in zip(wrapper.__closure__, _contents(wrapper))
    )
    twin = types.FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, cells)
    twin.__kwdefaults__ = wrapper.__kwdefaults__
    return twin


def _holds(function, within: tuple = ()) -> bool:
    """Whether `function` is an attention function of transformers, or has one in it."""
    if isinstance(function, functools.partial):
        return _holds(function.func, within)
    if not isinstance(function, types.FunctionType) or function in within:
        return False
    if is_standard(function):
        return list(inspect.signature(function).parameters)[:4] == ["module", "query", "key", "value"]
    return any(_holds(each, (*within, function)) for each in _contents(function))


def _contents(function: types.FunctionType) -> list:
    """What the cells of a closure hold; `None` for an empty one."""
    held = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            held.append(None)
    return held


def tell_of_dense_reads(function: Callable, unheeded: set[str], mask, wants_weights: bool) -> None:
    """Warn, once for each function and reason, that decoding cannot read the pages in place, and why."""
    inner = function.func if isinstance(function, functools.partial) else function
    name = ".".join(filter(None, (getattr(inner, "__module__", None), getattr(inner, "__qualname__", repr(inner)))))
    if wants_weights:
        reason = "attention weights are asked for (output_attentions, or dropout in training)"
    elif not is_standard(function):
        reason = (
            "it is none of transformers' own, or reads more than it hands on. If it computes what those compute, say "
            "so: hf_kvplus.treat_as_standard(function)"
        )
    elif unheeded:
        reason = f"it reads {', '.join(sorted(unheeded))}, which pages have no equivalent of"
    else:
        reason = f"its mask is a {type(mask).__name__}. Load the model with attn_implementation='sdpa' or 'eager'"
    if (name, reason) not in _told:
        _told.add((name, reason))
        warnings.warn(
            f"hf_kvplus: attention by {name} builds the dense keys and values of each layer at every step, which is "
            f"slow: {reason}.",
            stacklevel=2,
        )
