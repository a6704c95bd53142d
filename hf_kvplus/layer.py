"""One attention layer's cache: append to the tail, seal full pages, let the policy choose, place the pages.

The life of a token: `update` takes it (a prompt is held as it came until its attention has run; decoded tokens go
straight to the tail), `_seal_whole_pages` encodes them, the policy is asked once a row exceeds its budget by a page.
Sealing and evicting (`eviction.py`) happen when the next `update` starts, so a rejected draft (`crop`) leaves no trace.
"""

import copy
import math
from collections import Counter

import torch
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from . import eviction
from .errors import UnsupportedModelError
from .formats import FormatSpec
from .guards import carries_gradient, storing, tell_of_gradients
from .masks import by_position
from .padding import Padding
from .placement import Placement
from .reservation import Reservation
from .retention import Retention
from .sealed import SealedTokens
from .segment import NO_TOKEN
from .standin import StandIn, stand_ins
from .step import MAX_DECODE_TOKENS, on_host, within_graph
from .tail import Tail


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer in pages.

    Args:
        format: how pages are written.
        placement: where they live.
        retention: which tokens stay; `None` keeps all.
        page_size: tokens in a page.
        is_sliding: whether the model gives this layer the mask of its sliding (or chunked) attention.
        masked_by_model: whether that mask hides all that `retention` evicts.
        reserve: tokens per row to have room for before the first step; `None` grows as needed.

    `seen` counts the tokens given, padding included; a token's position is its index among those. Without a retention
    policy every position is stored, in order. The tail always holds the newest positions.

    With a reservation (`reserve`) the state lives in the tensors of `reservation` from the end of the prompt on, and a
    decode step touches nothing else. What needs the state on the host takes it back first (`take_back`).
    """

    is_croppable = True
    supports_early_init = False

    #: Dense tensors built from pages, over all layers: decoding leaves it alone (tests hold it to that).
    dense_reads = 0
    own_dense_reads = 0

    def __init__(
        self,
        format: FormatSpec,
        placement: Placement,
        retention: Retention | None = None,
        page_size: int = 64,
        is_sliding: bool = False,
        masked_by_model: bool = False,
        reserve: int | None = None,
    ) -> None:
        self.format, self.placement, self.retention = format, placement, retention
        self.page_size, self.is_sliding, self.masked_by_model = page_size, is_sliding, masked_by_model
        self.expansion = 1  # consecutive rows that hold the same prompt (num_beams, num_return_sequences)
        self.record_past = False
        self.reserved = reserve
        self.reset()

    # --- what transformers asks -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens and give their memory back."""
        self.is_initialized = False
        self.seen = 0
        self.evicted_at = 0  # `seen` when tokens were last evicted: no crop can go back behind it
        self.padding: Padding | None = None
        self.opened_at = math.inf  # `seen` when every row had such a token: until then, any update is part of a prompt
        self.sealed: SealedTokens | None = None
        self.tail: Tail | None = None
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None  # given, but attention has not run yet
        self._hidden: torch.Tensor | None = None  # bool [rows, pending]: which of those are padding
        self._untold = 0  # newest tokens of which is not known yet whether they are padding
        self._grown = False  # pages were sealed since the policy was last asked
        self.reservation: Reservation | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, self.dtype, self.value_dtype = key_states.device, key_states.dtype, value_states.dtype
        self.sealed = SealedTokens(
            key_states, value_states, self.format, self.placement, self.page_size, self.retention is not None
        )
        self.tail = Tail(key_states, value_states)
        self.padding = Padding(self.rows, self.device)
        self.is_initialized = True

    @property
    def rows(self) -> int:
        return 0 if self.tail is None else self.tail.rows

    def get_seq_length(self) -> int:
        """Tokens seen, padding and evicted ones included: the position of the next one.

        With a reservation, an int64 tensor where asking the device would wait (as of transformers' static caches): the
        one that counts them within a graph, else a copy of it.
        """
        if self.reservation is None:
            return self.seen
        if within_graph(self.device):
            return self.reservation.seen
        return int(self.reservation.seen) if on_host(self.device) else self.reservation.seen.clone()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are asked for over all positions; columns of evicted tokens are left out when they are applied."""
        return (self.seen + query_length if self.reservation is None else self.reservation.capacity), 0

    def get_max_length(self) -> int:
        """The window of a layer of the model's that has one, else -1 (as transformers' layers have it)."""
        return self.retention.window if self.is_sliding else -1

    get_max_cache_shape = get_max_length

    def activate_past_recording(self, **kwargs) -> None:
        """Announce that `crop` follows the next updates: what it may take back is neither sealed nor evicted."""
        self.record_past = True
        if self.reservation is not None:
            self.take_back()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[StandIn, StandIn]:
        """Take new tokens `[rows, heads, new, dim]` and return stand-ins for all keys and all values.

        Keys and values may differ in dtype, and from those stored: a layer stores what came first as it came and
        rounds later tokens to that; stand-ins are read in the dtype of the tokens given last.
        """
        if self.reservation is not None and self._fits_a_step(key_states, value_states):
            return self.reservation.update(key_states, value_states, self)
        return self._update(key_states, value_states, carries_gradient(key_states, value_states))

    def _fits_a_step(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether these tokens can be taken without the host: some may be padding, and steps have no gradients."""
        rows, _, new, _ = key_states.shape
        if rows != self.reservation.rows or new > (MAX_DECODE_TOKENS if self.retention is None else 1):
            return False
        if carries_gradient(key_states, value_states):
            return False
        if within_graph(self.device):
            return True
        return int(self.reservation.seen) + new <= self.reservation.capacity

    @torch.compiler.disable
    @storing
    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor, trains: bool) -> tuple[StandIn, StandIn]:
        self.take_back()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.rows:
            raise ValueError(
                f"`key_states` has {key_states.shape[0]} rows, but this cache holds {self.rows} sequences. "
                "Call `batch_repeat_interleave`, `fork` or `reset` first."
            )
        self._settle()
        new, empty = key_states.shape[-2], self.seen == 0
        if trains:
            tell_of_gradients()
        if self.seen < self.opened_at or new > MAX_DECODE_TOKENS or trains:
            self._pending = (key_states, value_states)  # as they came: gradients reach the tokens of this call
        else:
            self.tail.append(key_states, value_states)
        self.seen += new
        self._untold = new
        return stand_ins(self, key_states, value_states, self.seen, fresh=empty)

    # --- steps of fixed tensors -----------------------------------------------------------------------------------

    @property
    def is_compileable(self) -> bool:
        return self.reserved is not None and self.seen <= self.reserved and not self.record_past

    def reserve(self, tokens: int | None) -> None:
        """From the next tokens on, have room for so many (padding included) at once; `None`: grow as needed."""
        if tokens != self.reserved:
            self.take_back()
        self.reserved = tokens

    @storing
    def resume(self) -> None:
        """Go (back) to steps of fixed tensors, if that was asked for and the prompt is stored."""
        at_rest = self.is_initialized and self._pending is None and self.opened_at <= self.seen
        if self.reservation is None and self.is_compileable and at_rest:
            self.reservation = Reservation(self, self.reserved)

    @storing
    def take_back(self) -> None:
        """Have the state on the host again."""
        if self.reservation is not None:
            self.reservation.hand_back(self)
            self.reservation, self._grown = None, True

    @property
    def masked_by_positions(self) -> bool:
        """Whether a mask over positions hides all that a query must not see."""
        return self.retention is None or self.masked_by_model

    # --- reading --------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Token slots that attention runs over: those of the pages, the tail, and what is pending."""
        return self.sealed.slots + self.tail.length + (self._pending[0].shape[-2] if self._pending else 0)

    def unsealed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens that are in no page yet, each in the dtype in which they are stored."""
        stored = self.tail.keys, self.tail.values
        if self._pending is None:
            return stored
        pending = (tokens.to(tail.dtype) for tokens, tail in zip(self._pending, stored))
        if self.tail.length == 0:
            return tuple(pending)
        return tuple(torch.cat(pair, dim=-2) for pair in zip(stored, pending))

    def slot_positions(self) -> torch.Tensor:
        """Position of every slot, int32 `[rows, heads, slots]`; -1 where it holds no token. Only with a policy."""
        sealed = self.sealed.slot_positions()
        unsealed = self.slots - sealed.shape[-1]
        recent = torch.arange(self.seen - unsealed, self.seen, dtype=sealed.dtype, device=sealed.device)
        recent = recent.expand(self.rows, -1)
        padding = self._unsealed_padding()
        if padding is not None:
            recent = recent.masked_fill(padding, NO_TOKEN)
        return torch.cat([sealed, recent[:, None].expand(-1, sealed.shape[1], -1)], dim=-1)

    def _unsealed_padding(self) -> torch.Tensor | None:
        """Bool `[rows, unsealed]`: which of the unsealed slots hold no token; `None` if all do."""
        if self.tail.padding is None and self._hidden is None:
            return None
        pending = self._pending[0].shape[-2] if self._pending else 0
        blank = torch.zeros((self.rows, pending), dtype=torch.bool, device=self.device)
        return torch.cat([self.tail.holes(), blank if self._hidden is None else self._hidden], dim=1)

    def own_positions(self, positions: torch.Tensor, rows=slice(None)) -> torch.Tensor:
        """`positions [rows, heads, n]` (of `rows`) as `Padding.own_positions` has them."""
        return self.padding.own_positions(positions, self.seen, rows)

    def dense(self, name: str) -> torch.Tensor:
        """`"keys"` or `"values"` of all slots, decoded, `[rows, heads, slots, dim]`; zeros where a page is missing."""
        self._count_dense_read()
        return torch.cat([self.sealed.read(name), self.unsealed()[name == "values"]], dim=-2)

    def _count_dense_read(self) -> None:
        if not torch.compiler.is_compiling():
            PagedLayer.dense_reads += 1
            self.own_dense_reads += 1

    def _dense_reserved(self, name: str, tokens: int) -> torch.Tensor:
        self._count_dense_read()
        return self.reservation.dense(name)[:, :, :tokens]

    def contiguous(self, name: str) -> torch.Tensor:
        """As `dense`, but indexed by position: `[rows, heads, seen, dim]`, zeros where a token was evicted."""
        if self.reservation is not None:
            return self._dense_reserved(name, int(self.reservation.seen))
        dense = self.dense(name)
        if self.retention is None:
            return dense
        return by_position(dense, self.slot_positions(), self.seen)

    def _refuse_assignment(self, tokens) -> None:
        raise UnsupportedModelError(
            "hf_kvplus: `keys` and `values` of a paged layer are decoded when they are read, and cannot be assigned. "
            "To drop tokens, use `crop`, or a string with a retention policy (such as 'keydiff_paged_int8'); to change "
            "rows, `reorder_cache` or `batch_select_indices`; to store other tokens, `reset` and `update`. Code that "
            "must edit stored keys needs transformers' DynamicCache."
        )

    keys = property(lambda self: self.contiguous("keys") if self.is_initialized else None, _refuse_assignment)
    values = property(lambda self: self.contiguous("values") if self.is_initialized else None, _refuse_assignment)

    def touch(self, standin: StandIn) -> torch.Tensor:
        """The dense tensor for code that is not our attention function (a model that reshapes keys, say)."""
        if not self.masked_by_positions:
            raise UnsupportedModelError(
                f"This model reads the cached {standin.name} outside of its attention function (inline attention, or "
                "latents that are expanded), so a cache that evicts tokens cannot serve it. Use a string without a "
                "retention policy, such as 'paged_int8'."
            )
        if standin.fresh is not None:
            self.commit()
            self.resume()
            return standin.fresh
        if self.reservation is not None:
            return self._dense_reserved(standin.name, standin.shape[2])
        # A stand-in that outlived later updates still means the tokens of its own time.
        return self.contiguous(standin.name)[:, :, : standin.shape[2]]

    # --- sealing --------------------------------------------------------------------------------------------------

    def learn_padding(self, padding: torch.Tensor | None) -> None:
        """Take in which of the tokens of the last `update` are padding, before the policy decides what they see.

        Args:
            padding: bool `[rows, new]`, tokens that no query may ever see; `None` if there are none.
        """
        if padding is None or not self._untold:
            return
        self._untold = 0
        self.padding.learn(padding, self.seen, with_gaps=not self.masked_by_positions)
        if self._pending is None:
            self.tail.hide(pad(padding, (self.tail.length - padding.shape[1], 0)))
        else:
            self._hidden = padding

    @storing
    def commit(self, padding: torch.Tensor | None = None) -> None:
        """Store the tokens that `update` left pending, now that attention has used them as they came.

        Args:
            padding: as for `learn_padding`, if that was not called before.
        """
        self.learn_padding(padding)
        self._untold = 0
        if self._pending is None:
            return
        (keys, values), padding = self.unsealed(), self._unsealed_padding()
        prompt = self.seen == self._pending[0].shape[-2]
        copies = self._same_prompts(keys, values)
        if self.seen < self.opened_at and (padding is None or bool((self.padding.first < self.seen).all())):
            self.opened_at = self.seen
        if prompt and self.retention is not None and not self.record_past and eviction.outgrown(self, self.seen):
            eviction.seal_survivors(self, keys, values, padding, copies=copies)
        else:
            # Drafts among these tokens may be cropped next: the last ones are kept as they came.
            self._seal_whole_pages(keys, values, padding, self.page_size if self.record_past else 0, copies)
        self._pending = self._hidden = None  # only now: tokens that cannot be encoded can still be cropped

    def _settle(self) -> None:
        """Bring the layer to rest: nothing pending, the budget kept, full pages sealed."""
        self.commit()
        due = self.tail.length - self.format.residual >= self.page_size
        # Eviction comes first: what is sealed takes the place of what is dropped.
        if self.retention is not None and not self.retention.whole_pages:
            eviction.evict_tokens(self)
        elif self.retention is not None and (due or self._grown):
            eviction.evict_pages(self)
        if self.tail.length - self.format.residual >= self.page_size:
            self._seal_whole_pages(self.tail.keys, self.tail.values, self.tail.padding)
        self._grown = False

    def _seal_whole_pages(self, keys, values, padding, margin: int = 0, copies: int = 1) -> None:
        """Seal the oldest of the unsealed tokens given; the rest (at least residual and margin) is the new tail."""
        length = keys.shape[-2]
        whole = max(0, length - self.format.residual - margin) // self.page_size * self.page_size
        if whole:
            positions = None
            if padding is not None or self.retention is not None:
                start = self.seen - length
                positions = torch.arange(start, start + whole, dtype=torch.int32, device=self.device)
                positions = positions.expand(*keys.shape[:2], -1)
                if padding is not None:
                    positions = positions.masked_fill(padding[:, None, :whole], NO_TOKEN)
            self.sealed.append(keys[:, :, :whole], values[:, :, :whole], positions, copies)
            self._grown = True
        self.tail.replace(keys[:, :, whole:], values[:, :, whole:], None if padding is None else padding[:, whole:])

    def _same_prompts(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """`expansion` if every group of so many rows really holds the same tokens, else 1."""
        if self.expansion == 1 or self.rows % self.expansion:
            return 1
        for tokens in (keys, values):
            # Rows of one batch may differ by rounding; conversations that are told the same differ by little more.
            rounding = max(2 * torch.finfo(tokens.dtype).eps, 1e-5)
            groups = tokens.unflatten(0, (-1, self.expansion))
            first, others = groups[:, :1].expand_as(groups[:, 1:]), groups[:, 1:]
            usual = float(first.float().square().mean().sqrt())
            if not torch.allclose(others, first, rtol=rounding, atol=rounding * usual):
                return 1
        return self.expansion

    # --- rows and rollback ----------------------------------------------------------------------------------------

    @storing
    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens (0 or less, as transformers 5.19 and later have it)."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 hands over a tensor
        if tokens_to_remove > 0:
            raise ValueError(
                f"`tokens_to_remove`: got {tokens_to_remove}, accepted: 0 or a negative number, how many of the newest "
                f"tokens to forget. To keep {tokens_to_remove}, pass {tokens_to_remove - int(self.get_seq_length())}."
            )
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        self.take_back()
        target = max(0, self.seen + tokens_to_remove)
        if self._pending is not None and target <= self.seen - self._pending[0].shape[-2]:
            self.seen -= self._pending[0].shape[-2]
            self._pending = self._hidden = None
        self.commit()
        if target < self.evicted_at:
            raise ValueError(
                f"`tokens_to_remove`: got {tokens_to_remove}, which goes back to {target} tokens, but tokens were "
                f"evicted when {self.evicted_at} had been seen. Crop less, `fork` the cache before generating and go "
                "back to the fork, or use a string without a retention policy."
            )
        missing = self.seen - target - self.tail.length  # tokens to take back out of the pages
        if missing <= 0:
            self.tail.crop(-missing)
        else:
            self.tail.replace(*self.sealed.truncate(self.sealed.slots - missing))
        self.seen = target
        self.padding.crop(target)
        if target < self.opened_at:
            self.opened_at = math.inf
        self.resume()

    @storing
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was: pages by their numbers, the tail by copy."""
        if not self.is_initialized:
            return
        self.take_back()
        self.commit()
        self.sealed.select_rows(beam_idx)
        self.tail.select_rows(beam_idx)
        self.padding.select_rows(beam_idx)
        self.resume()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side."""
        self.reorder_cache(torch.arange(self.rows, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (numbers, or a bool mask)."""
        self.reorder_cache(torch.arange(self.rows, device="cpu")[torch.as_tensor(indices, device="cpu")])

    @storing
    def fork(self, repeats: int) -> "PagedLayer":
        """An independent layer with every row `repeats` times, which shares this one's pages."""
        self.take_back()
        self.commit()
        twin = copy.copy(self)
        if self.is_initialized:
            twin.sealed, twin.tail, twin.padding = self.sealed.fork(), self.tail.copy(), self.padding.copy()
            twin.batch_repeat_interleave(repeats)
        self.resume()
        return twin

    def __deepcopy__(self, memo: dict) -> "PagedLayer":
        """A fork: pages never change, so an independent copy need not copy them."""
        return self.fork(1)

    def __copy__(self) -> "PagedLayer":
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __getstate__(self) -> dict:
        """What is pickled: the layer without its reservation, which both make again when tokens come."""
        self.take_back()
        return vars(self)

    def offload(self) -> None:
        """Nothing to do: the placement decided where the pages live when they were written."""

    def prefetch(self) -> None:
        """Start bringing this layer's pages to its device, if they live elsewhere."""
        if self.is_initialized and not self.placement.in_place:
            for segment in self.sealed.segments:
                segment.storage.prefetch()

    def beside(self) -> dict:
        """What this layer holds beside keys and values, by attribute."""
        return {}

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of every tensor and file that keys and values take in this layer, by tier."""
        if not self.is_initialized:
            return {}
        loose = [*(self._pending or ()), self.padding.first, self.padding.gaps, self._hidden]
        loose = sum(tensor.nbytes for tensor in loose if tensor is not None)
        loose += self.reservation.bytes_beside(self) if self.reservation else 0
        tiers = Counter({str(self.device): self.tail.nbytes + loose})
        for segment in self.sealed.segments:
            tiers.update(segment.bytes_by_tier())
        return dict(tiers)
