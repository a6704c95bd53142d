"""Every kind of model that has a cache, against `DynamicCache` and against the table in docs/models.md."""

import functools
import importlib.util
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_models as tiny
import torch
import transformers
from numerics import assert_close, relative_rms
from transformers import LogitsProcessor
from transformers.generation.configuration_utils import GenerationMode

import hf_kvplus
from hf_kvplus.attention import slot_mask
from hf_kvplus.formats import FORMATS
from hf_kvplus.layer import PagedLayer
from hf_kvplus.placement import Resident
from hf_kvplus.retention.keydiff import KeyDiff

NEW = 24  # tokens generated: with pages of 8, several seals
PAGES = {"page_size": 8}
#: Relative RMS of a step's logits when only the order of float32 sums differs.
ROUNDING = 1e-5
ILL_CONDITIONED = {"gemma4_text": 1e-4}  # sdpa and eager of transformers differ as much
#: What int8 may lose; `kolibri1_1` rounds its keys to four bits, which makes a small difference a large one.
INT8 = {"gemma4_text": 0.1, "kolibri1_1": 0.1}

#: Padding changes what these answer, with `DynamicCache` too.
PADDING_SHOWS = ("minimax_m3_vl_text", "recurrent_gemma")

EXACT = ("paged_native", "offloaded_paged_native")
EVICTING = {
    "sliding_paged_native": ({"window": 10, "sink_tokens": 2}, {"window": 500}),
    "keydiff_paged_native": ({"budget": 12}, {"budget": 500}),
}


@dataclass
class Row:
    """What docs/models.md says about a model type."""

    served: bool
    evicts: bool = False
    fused: bool = False


@functools.cache
def table() -> dict[str, Row]:
    rows = {}
    for line in (Path(__file__).parents[1] / "docs" / "models.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        for type_ in re.findall(r"`(\w+)`", cells[1]) if line.startswith("|") else []:
            rows[type_] = Row(True, cells[4] == "yes", cells[5] == "fused") if len(cells) == 8 else Row(False)
            if "inline before transformers" in cells[-2] and not _asks_for_attention(type_):
                rows[type_] = Row(True)
    return rows


def _asks_for_attention(type_: str) -> bool:
    """Whether this version of the model asks transformers for an attention function."""
    source = importlib.util.find_spec(f"transformers.models.{type_}.modeling_{type_}").origin
    return "get_interface" in Path(source).read_text()


def row(name: str) -> Row:
    return table()[tiny.model_type(name)]


SERVED = [name for name in tiny.names() if row(name).served]
REFUSED = [name for name in tiny.names() if not row(name).served]
EVICTABLE = [name for name in SERVED if row(name).evicts]
PINNED = [name for name in SERVED if not row(name).evicts]


@functools.cache
def build(name: str):
    return tiny.build(name)


def attentions(name: str) -> list[str]:
    return ["sdpa", "eager"] if build(name)._supports_sdpa else ["eager"]


def generate(name: str, attention: str, lengths=(tiny.PROMPT,), string=None, options=None, inputs=None, **kwargs):
    model = build(name)
    model.set_attn_implementation(attention)
    if string is not None:
        kwargs.update(cache_implementation=string, cache_config={**PAGES, **(options or {})})
    return model.generate(
        **(inputs or tiny.inputs(name, model, lengths)),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **kwargs,
    )


@functools.cache
def dynamic(name: str, attention: str, lengths=(tiny.PROMPT,), num_beams=1):
    """What transformers' own cache gives: the tokens, and the logits of each step."""
    out = generate(name, attention, lengths, num_beams=num_beams)
    return out.sequences, torch.stack(out.logits)


def assert_same(name: str, out, reference) -> None:
    tokens, logits = reference
    assert out.sequences.tolist() == tokens.tolist()
    assert_close(f"logits of {name}", torch.stack(out.logits), logits, ILL_CONDITIONED.get(name, ROUNDING))


@pytest.mark.parametrize("string", EXACT)
@pytest.mark.parametrize("name", SERVED)
def test_cache_that_keeps_all_is_exact(name, string):
    for attention in attentions(name):
        assert_same(name, generate(name, attention, string=string), dynamic(name, attention))


@pytest.mark.parametrize("name", SERVED)
def test_left_padded_batch(name):
    lengths = (tiny.PROMPT, 12 if name in tiny.MULTIMODAL else 4)
    for attention in attentions(name):
        assert_same(name, generate(name, attention, lengths, "paged_native"), dynamic(name, attention, lengths))


@pytest.mark.parametrize("name", SERVED)
def test_beam_search(name):
    attention = attentions(name)[0]
    out = generate(name, attention, string="paged_native", num_beams=3)
    assert_same(name, out, dynamic(name, attention, num_beams=3))


@pytest.mark.parametrize("name", SERVED)
def test_int8_is_close(name):
    attention = attentions(name)[0]
    tokens, logits = dynamic(name, attention)
    out = generate(name, attention, string="paged_int8", logits_processor=[_Forced(tokens)])
    assert out.sequences.tolist() == tokens.tolist()
    assert_close(f"logits of {name}", torch.stack(out.logits), logits, INT8.get(name, 0.02))


@pytest.mark.parametrize("string", EVICTING)
@pytest.mark.parametrize("name", EVICTABLE)
def test_evicting_cache(name, string):
    tight, ample = EVICTING[string]
    lengths = (tiny.PROMPT, 12)
    for attention in attentions(name):
        assert_same(name, generate(name, attention, string=string, options=ample), dynamic(name, attention))
        out = generate(name, attention, lengths, string, tight)
        assert len(out.logits) == NEW
        assert torch.stack(out.logits).isfinite().all()


@pytest.mark.parametrize("string", EVICTING)
@pytest.mark.parametrize("name", [name for name in EVICTABLE if name in tiny.TEXT and name not in PADDING_SHOWS])
def test_row_of_a_padded_batch_evicts_as_it_would_alone(name, string):
    attention, (tight, _) = attentions(name)[0], EVICTING[string]
    batch = tiny.inputs(name, build(name), (tiny.PROMPT, 12))
    alone = {key: value[1:, tiny.PROMPT - 12 :] for key, value in batch.items()}
    row, own = (generate(name, attention, string=string, options=tight, inputs=inputs) for inputs in (batch, alone))
    assert row.sequences[1, -NEW:].tolist() == own.sequences[0, -NEW:].tolist()
    assert_close("logits", torch.stack(row.logits)[:, 1], torch.stack(own.logits)[:, 0], 1e-4)


@pytest.mark.parametrize(
    ("name", "string"),
    # The windows of doge are narrower than KeyDiff's budget: it has nothing to evict there.
    [pair for pair in itertools.product(PINNED, EVICTING) if pair != ("doge", "keydiff_paged_native")],
)
def test_evicting_cache_is_refused(name, string):
    tight, _ = EVICTING[string]
    watch = _Watch()
    with pytest.raises(hf_kvplus.UnsupportedModelError, match="'paged_int8'"):
        generate(name, attentions(name)[0], string=string, options=tight, logits_processor=[watch])
    assert watch.steps == 0, "refused, but only after the first token"


@pytest.mark.parametrize("string", [*EXACT, *EVICTING])
@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused(name, string):
    watch = _Watch()
    with pytest.raises(hf_kvplus.UnsupportedModelError, match="for this model"):
        generate(name, attentions(name)[0], string=string, logits_processor=[watch])
    assert watch.steps == 0


@pytest.mark.parametrize(
    "kind", ["VibeVoiceForConditionalGeneration", "ParakeetForRNNT", "NemotronAsrStreamingForRNNT"]
)
def test_model_that_builds_its_own_cache_is_refused(kind):
    model = object.__new__(getattr(transformers, kind))
    vars(model)["config"] = model.config_class()
    config = transformers.GenerationConfig(cache_implementation="paged_int8")
    model._validate_generation_mode(GenerationMode.GREEDY_SEARCH, config, {})
    with pytest.raises(hf_kvplus.UnsupportedModelError, match=f"{kind}, which builds a cache of its own"):
        model._prepare_cache_for_generation(config, {}, GenerationMode.GREEDY_SEARCH, 1, 10)


def test_string_that_would_become_a_static_cache_is_refused():
    with pytest.raises(hf_kvplus.UnsupportedModelError, match="insists on a StaticCache"):
        build("llama")._prepare_static_cache(cache_implementation="paged_int8", batch_size=1, max_cache_len=8)


def test_diffusion_config_refuses_our_strings():
    diffusion = pytest.importorskip("transformers.models.diffusion_gemma.generation_diffusion_gemma")
    with pytest.raises(ValueError, match="but got paged_int8"):
        diffusion.DiffusionGemmaGenerationConfig(cache_implementation="paged_int8")


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_position_bias_belongs_to_the_tokens_that_stay(attention):
    """T5's bias is by distance: what evicting leaves must keep the distances of the full sequence."""
    options = {"window": 10, "sink_tokens": 2}
    out = generate("t5", attention, string="sliding_paged_native", options=options)
    model, tokens = build("t5"), out.sequences[:, :-1]
    query, key = torch.arange(tokens.shape[1])[:, None], torch.arange(tokens.shape[1])
    seen = (key <= query) & ((key < 2) | (key > query - 10))
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    inputs = {**tiny.inputs("t5", model), "decoder_input_ids": tokens, "decoder_attention_mask": mask}
    reference = model(**inputs, use_cache=False).logits[:, -NEW:]
    assert_close("logits", torch.stack(out.logits, dim=1), reference, ROUNDING)
    unmasked = model(**{**inputs, "decoder_attention_mask": None}, use_cache=False).logits[:, -NEW:]
    assert relative_rms(unmasked, reference) > 100 * ROUNDING  # the window matters to this model


def test_position_bias_where_each_head_keeps_its_own_tokens():
    layer = PagedLayer(FORMATS["native"], Resident(), KeyDiff(budget=8), page_size=8)
    for new in (21, 1):
        layer.update(torch.randn(1, 2, new, 4), torch.randn(1, 2, new, 4))
        layer.commit()
    bias = torch.randn(1, 4, 1, layer.seen)
    mask = slot_mask(layer, None, 1, None, {"position_bias": bias, "is_causal": True})
    positions = layer.slot_positions()
    assert not torch.equal(positions[:, 0], positions[:, 1])
    for head in range(4):
        kept = positions[0, head // 2]
        expected = bias[0, head, 0, kept.clamp(min=0).long()].masked_fill(kept < 0, torch.finfo(bias.dtype).min)
        assert torch.equal(mask[0, head, 0], expected)


class _Forced(LogitsProcessor):
    """Makes the next token that of a sequence given, whatever the logits (which are recorded as they were)."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __call__(self, input_ids, scores):
        chosen = self.tokens[:, input_ids.shape[1], None]
        return torch.full_like(scores, -math.inf).scatter(1, chosen, 0.0)


class _Watch(LogitsProcessor):
    """Counts the steps, and the dense tensors built up to the last of them."""

    def __init__(self) -> None:
        self.steps, self.before, self.dense = 0, PagedLayer.dense_reads, 0

    def __call__(self, input_ids, scores):
        self.steps, self.dense = self.steps + 1, PagedLayer.dense_reads - self.before
        return scores


@pytest.mark.parametrize(
    ("name", "string"),
    [*itertools.product(SERVED, ("paged_native", "paged_int8")), *itertools.product(EVICTABLE, EVICTING)],
)
def test_decoding_builds_the_dense_cache_only_where_the_table_says_so(name, string):
    for attention in attentions(name):
        watch = _Watch()
        generate(name, attention, string=string, options=EVICTING.get(string, [{}])[0], logits_processor=[watch])
        assert watch.steps == NEW
        assert (watch.dense == 0) == row(name).fused, f"{watch.dense} dense tensors under {attention}"
