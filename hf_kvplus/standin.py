"""What `PagedLayer.update` returns for "all keys" and "all values".

The attention function recognises a stand-in and reads the layer's pages. Any other code that touches one gets the dense
tensor, built at that moment, and goes on as with any cache.
"""

import torch

from .errors import UnsupportedModelError

#: What code that takes nothing but tensors is heard to say: its messages name the type, or show the object.
TENSORS_ALONE = "in pages, which code that takes nothing but tensors cannot read: leave the cache out for this model"


class StandIn:
    """Keys or values of a layer, as they were when `update` returned this object.

    Attributes:
        layer: the `PagedLayer` that holds the tokens.
        name: `"keys"` or `"values"`.
        fresh: the tensor just given to `update`, if it was the first of its sequences (an ordinary prefill).
        shape, dtype: those that the dense tensor has.
    """

    __qualname__ = f"StandIn (keys or values {TENSORS_ALONE})"

    def __init__(
        self, layer, name: str, shape: torch.Size, dtype: torch.dtype, fresh: torch.Tensor | None = None
    ) -> None:
        self.layer, self.name, self.shape, self.dtype, self.fresh = layer, name, shape, dtype, fresh

    def dense(self) -> torch.Tensor:
        """The tensor `[rows, kv_heads, tokens, dim]` that this object stands for."""
        return self.layer.touch(self).to(self.dtype)

    device = property(lambda self: self.layer.device)
    ndim = property(lambda self: 4)

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args, **kwargs):
        """Itself where nothing would change (accelerate moves what layers share), else the dense tensor, moved."""
        target = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        if (target.dtype, target.device) == (self.dtype, self.device):
            return self
        return self.dense().to(*args, **kwargs)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_"):
            self._refuse_edit()
        return getattr(self.dense(), name)

    def __setitem__(self, index, value) -> None:
        self._refuse_edit()

    def _refuse_edit(self) -> None:
        raise UnsupportedModelError(
            f"This model's code edits the cached {self.name} in place, and a page is never changed. Leave "
            "`cache_implementation` out for this model."
        )

    def __repr__(self) -> str:
        return f"<{self.name} {list(self.shape)} {TENSORS_ALONE}>"

    def __dlpack__(self, **kwargs):
        return self.dense().__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.dense().__dlpack_device__()

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name, out = getattr(func, "__name__", ""), (kwargs or {}).get("out")
        for written in (args[0] if name.endswith("_") and not name.endswith("__") and args else None, out):
            if isinstance(written, StandIn):
                written._refuse_edit()
        return func(*_dense(args), **_dense(kwargs or {}))


class Handle(StandIn):
    """A stand-in in the hands of a wrapper around an attention function, which may hand it on but not read it."""

    def __init__(self, standin: StandIn) -> None:
        super().__init__(standin.layer, standin.name, standin.shape, standin.dtype)
        self.standin = standin

    def dense(self) -> torch.Tensor:
        raise TypeError(f"the {self.name} of a paged cache are read")


def stand_ins(layer, keys: torch.Tensor, values: torch.Tensor, tokens: int, fresh: bool = False):
    """Stand-ins for all `tokens` keys and values of `layer`, of which `keys` and `values` were just given."""
    return tuple(
        StandIn(
            layer, name, torch.Size((*given.shape[:2], tokens, given.shape[-1])), given.dtype, given if fresh else None
        )
        for name, given in (("keys", keys), ("values", values))
    )


def _dense(value):
    """`value` with every stand-in in it, however deep in lists, tuples and dicts, replaced by its dense tensor."""
    if isinstance(value, StandIn):
        return value.dense()
    if type(value) in (list, tuple):
        return type(value)(_dense(item) for item in value)
    if type(value) is dict:
        return {key: _dense(item) for key, item in value.items()}
    return value


def _forward(operator: str):
    def method(self, *args):
        return getattr(self.dense(), operator)(*_dense(args))

    method.__name__ = operator
    return method


for _operator in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod matmul rmatmul pow rpow "
    "neg abs getitem iter lt le gt ge eq ne and or invert"
).split():
    setattr(StandIn, f"__{_operator}__", _forward(f"__{_operator}__"))
StandIn.__hash__ = object.__hash__
