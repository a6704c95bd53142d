"""A layer with a linear state beside its keys and values (Falcon-H1, Zamba2): the state as it was, pages beside it."""

from transformers.cache_utils import LinearAttentionLayer

from .guards import detached_copy
from .layer import PagedLayer


class HybridPagedLayer(PagedLayer, LinearAttentionLayer):
    """A `PagedLayer` that also is a `LinearAttentionLayer` of transformers; what both have is asked of both.

    Args:
        number_of_states: convolution (and recurrent) states that the linear half keeps.
        options: as for `PagedLayer`.
    """

    is_compileable = False

    def __init__(self, number_of_states: int, **options) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        PagedLayer.__init__(self, **options)

    def lazy_initialization(self, *args, **kwargs) -> None:
        """For keys and values (two tensors by position), or for a state (by name), as transformers tells them apart."""
        kind = PagedLayer if len(args) == 2 and not kwargs else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        PagedLayer.reset(self)

    def reorder_cache(self, beam_idx) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        PagedLayer.reorder_cache(self, beam_idx)

    def activate_past_recording(self, **kwargs) -> None:
        LinearAttentionLayer.activate_past_recording(self, **kwargs)
        PagedLayer.activate_past_recording(self, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        if self.record_past:  # else the linear half refuses
            PagedLayer.crop(self, tokens_to_remove)
        LinearAttentionLayer.crop(self, tokens_to_remove)

    def __copy__(self) -> "HybridPagedLayer":
        twin = super().__copy__()
        vars(twin).update(detached_copy(self.beside()))
        return twin

    def beside(self) -> dict:
        """The attributes of the linear half."""
        names = vars(LinearAttentionLayer(self.number_of_states)).keys() | {"recurrent_states_history"}
        return {name: value for name, value in vars(self).items() if name in names}
