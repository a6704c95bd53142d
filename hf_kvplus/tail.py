"""The newest tokens of a layer, in the model's dtype, until a page's worth is sealed."""

import torch

_STEP = 8  # slots that the buffers grow by: a short tail is a small one


class Tail:
    """Keys and values `[rows, heads, length, dim]` of the newest tokens; all rows have the same `length`.

    Attributes:
        length: tokens held.
        padding: bool `[rows, length]` of slots that hold no token (padding, mostly), or `None` if all do.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """An empty tail for tokens like `keys`, `values` `[rows, heads, any, dim]`."""
        self._keys = keys.new_empty((*keys.shape[:2], 0, keys.shape[-1]))
        self._values = values.new_empty((*values.shape[:2], 0, values.shape[-1]))
        self.length = 0
        self.padding: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self._keys.shape[0]

    @property
    def keys(self) -> torch.Tensor:
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> torch.Tensor:
        return self._values[:, :, : self.length]

    @property
    def nbytes(self) -> int:
        padding = 0 if self.padding is None else self.padding.untyped_storage().nbytes()
        return self._keys.nbytes + self._values.nbytes + padding

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add tokens, none of them padding."""
        end = self.length + keys.shape[-2]
        if end > self._keys.shape[-2]:
            room = -(-end // _STEP) * _STEP
            self._keys, self._values = self._grown(self._keys, room), self._grown(self._values, room)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        if self.padding is not None:
            self.padding = torch.nn.functional.pad(self.padding, (0, end - self.length))
        self.length = end

    def _grown(self, buffer: torch.Tensor, room: int) -> torch.Tensor:
        grown = buffer.new_empty((*buffer.shape[:2], room, buffer.shape[-1]))
        grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def replace(self, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor | None = None) -> None:
        """Hold copies of exactly these tokens."""
        self._keys, self._values = self._keys[:, :, :0], self._values[:, :, :0]
        self.length, self.padding = 0, None
        # `[:, :, :0]` may view a larger buffer; an empty one lets go of it.
        self._keys, self._values = self._keys.clone(), self._values.clone()
        self.append(keys, values)
        if padding is not None and bool(padding.any()):
            self.padding = padding.clone()  # not a view that keeps a whole prompt's alive

    def holes(self) -> torch.Tensor:
        """Bool `[rows, length]`: the slots that hold no token."""
        if self.padding is not None:
            return self.padding
        return torch.zeros((self.rows, self.length), dtype=torch.bool, device=self._keys.device)

    def hide(self, slots: torch.Tensor) -> None:
        """Make `slots`, bool `[rows, length]`, hold no token."""
        self.padding = slots if self.padding is None else self.padding | slots

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self.length = length
        if self.padding is not None:
            self.padding = self.padding[:, :length]

    def select_rows(self, index: torch.Tensor) -> None:
        """Row `i` becomes a copy of what row `index[i]` was."""
        index = index.to(self._keys.device)
        self._keys, self._values = self._keys.index_select(0, index), self._values.index_select(0, index)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, index)

    def copy(self) -> "Tail":
        twin = Tail(self._keys, self._values)
        twin._keys, twin._values, twin.length = self._keys.clone(), self._values.clone(), self.length
        twin.padding = self.padding
        return twin
