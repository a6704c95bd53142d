"""What caches that evict should compute: full attention, and an explicit mask over the tokens that the policy keeps.

Nothing here is the package's code. A `ReferenceCache` stores every token as `DynamicCache` does, and knows for every
row and head which of them are still there. When the policies are asked is what `hf_kvplus.layer` documents:

- The first forward pass attends to all of its tokens.
- A row that holds more than its budget after that pass, or exceeds it by a page before a later one, is cut down to it.
- Padding is no token: a row counts, keeps and scores its own tokens only.
"""

from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import eager_mask


class Window:
    """Every query sees the first `sinks` tokens of its row, and the last `window`, itself included."""

    def __init__(self, window: int, sinks: int) -> None:
        self.window, self.sinks = window, sinks

    def visible(self, layer, queries: int) -> torch.Tensor:
        """Bool `[rows, heads, queries, tokens]`, of the newest tokens' view of all."""
        own = layer.real.cumsum(-1) - 1  # the index of every token among those of its row
        query, key = own[:, -queries:, None], own[:, None]
        return ((key < self.sinks) | (key > query - self.window))[:, None].expand(-1, layer.kept.shape[1], -1, -1)

    def evict(self, layer, slack: int) -> None:
        """Nothing to do: what a query may see depends on its distance alone."""


class Distinct:
    """KeyDiff: of every row and head, keep the keys that point furthest away from the mean direction of all of them.

    Args:
        budget: tokens, or the fraction of a row's tokens.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget

    def visible(self, layer, queries: int) -> torch.Tensor:
        return layer.kept[:, :, None].expand(-1, -1, queries, -1)

    def evict(self, layer, slack: int) -> None:
        for row in range(layer.kept.shape[0]):
            length = int(layer.real[row].sum())
            budget = self.budget if isinstance(self.budget, int) else max(1, round(self.budget * length))
            for head in range(layer.kept.shape[1]):
                held = layer.kept[row, head].nonzero().flatten()
                if len(held) <= budget + slack:
                    continue
                keys = layer.keys[row, head, held].double()
                directions = keys / keys.norm(dim=-1, keepdim=True).clamp(min=1e-12)
                mean = directions.mean(0)
                likeness = directions @ (mean / mean.norm())
                layer.kept[row, head] = False
                layer.kept[row, head, held[likeness.argsort(stable=True)[:budget]]] = True


class ReferenceLayer(DynamicLayer):
    """Keeps every key and value, and with them `kept [rows, heads, tokens]` and `real [rows, tokens]` (no padding)."""

    def __init__(self, policy, page_size: int) -> None:
        super().__init__()
        self.policy, self.page_size = policy, page_size
        self.record_past, self.passes = False, 0

    def activate_past_recording(self, **kwargs) -> None:
        self.record_past = True

    def update(self, key_states, value_states, *args, **kwargs):
        rows, heads, new = key_states.shape[:3]
        if self.passes == 0:
            self.kept = torch.zeros(rows, heads, 0, dtype=torch.bool)
            self.real = torch.zeros(rows, 0, dtype=torch.bool)
        else:
            self.evict()
        self.passes += 1
        self.kept = torch.cat([self.kept, torch.ones(rows, heads, new, dtype=torch.bool)], dim=-1)
        self.real = torch.cat([self.real, torch.ones(rows, new, dtype=torch.bool)], dim=-1)
        return super().update(key_states, value_states, *args, **kwargs)

    def learn_padding(self, shown: torch.Tensor) -> None:
        """Forget the tokens of this pass that no query sees; `shown` is bool `[rows, 1, new, tokens]`."""
        new = shown.shape[2]
        self.real[:, -new:] &= shown[..., -new:].any(dim=2)[:, 0]
        self.kept[..., -new:] &= self.real[:, None, -new:]

    def visible(self, queries: int) -> torch.Tensor:
        everything = torch.ones_like(self.kept)[:, :, None].expand(-1, -1, queries, -1)
        return everything if self.passes == 1 else self.policy.visible(self, queries)

    def evict(self) -> None:
        prompt_ended = self.passes == 1 and not self.record_past
        self.policy.evict(self, slack=0 if prompt_ended else self.page_size - 1)

    def held(self) -> list[list[list[int]]]:
        """The positions kept, per row and head, as the next pass would find them."""
        self.evict()
        return [[head.nonzero().flatten().tolist() for head in row] for row in self.kept]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        length = self.keys.shape[-2]
        self.kept, self.real = self.kept[..., :length], self.real[:, :length]

    def reorder_cache(self, beam_idx) -> None:
        super().reorder_cache(beam_idx)
        self.kept, self.real = self.kept[beam_idx], self.real[beam_idx]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(len(self.kept)).repeat_interleave(repeats))

    def batch_select_indices(self, indices) -> None:
        self.reorder_cache(torch.arange(len(self.kept))[indices])


class ReferenceCache(DynamicCache):
    def __init__(self, config, policy, page_size: int) -> None:
        super().__init__(config=config)
        self.layers = [ReferenceLayer(policy, page_size) for _ in self.layers]


@contextmanager
def reference_attention(model, cache: ReferenceCache, sharpness: float = 1.0, bias=None):
    """Within it, `model` attends to what `cache` says is still there; scores are multiplied by `sharpness`.

    Args:
        bias: takes the distances int `[rows, 1, queries, tokens]` in the row's own tokens and answers what to add to
            the scores; the mask that the model made then says no more than what is visible.
    """

    def attention(module, query, key, value, mask, scaling, **kwargs):
        layer = cache.layers[module.layer_idx]
        groups = query.shape[1] // key.shape[1]
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(query.dtype).min)
        shown = (mask > torch.finfo(mask.dtype).min / 2).any(1, keepdim=True)
        layer.learn_padding(shown.expand(key.shape[0], 1, -1, -1))
        if bias is not None:
            own = layer.real.cumsum(-1)[:, None]
            mask = bias(own[..., -query.shape[2] :, None] - own[..., None, :]).masked_fill(
                ~shown, torch.finfo(query.dtype).min
            )
        visible = layer.visible(query.shape[2]).repeat_interleave(groups, dim=1)
        scores = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * scaling * sharpness
        weights = (scores + mask).masked_fill(~visible, torch.finfo(query.dtype).min).softmax(-1)
        return (weights @ value.repeat_interleave(groups, dim=1)).transpose(1, 2), weights

    before = model.config._attn_implementation
    AttentionInterface.register("reference", attention)
    AttentionMaskInterface.register("reference", eager_mask)
    model.set_attn_implementation("reference")
    try:
        yield cache
    finally:
        model.set_attn_implementation(before)
        del AttentionInterface._global_mapping["reference"], AttentionMaskInterface._global_mapping["reference"]
