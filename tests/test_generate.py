"""Caches that keep every token: `generate()` does as it does with transformers' own `DynamicCache`."""

import copy

import pytest
import torch
from conftest import tiny_llama
from generating import (
    MODES,
    NEW,
    ROUNDING,
    Forced,
    Recorder,
    assert_same_run,
    drafting_model,
    generate,
    main_model,
    own_prompt,
    prompts,
    tokens,
)
from numerics import assert_close
from torch.nn.functional import log_softmax, pad
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, MistralConfig, MistralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_kvplus
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.formats import FORMATS
from hf_kvplus.layer import PagedLayer
from hf_kvplus.placement import Resident

EXACT = {
    "resident": ("paged_native", {}),
    "cpu": ("offloaded_paged_native", {"offload_to": "cpu"}),
    "disk": ("offloaded_paged_native", {"offload_to": "disk"}),
}


@pytest.fixture(scope="module")
def model():
    return main_model()


@pytest.fixture(scope="module")
def assistant():
    return drafting_model()


@pytest.fixture(params=EXACT, scope="module")
def exact(request, tmp_path_factory):
    """`generate` arguments of a cache that loses nothing."""
    name, options = EXACT[request.param]
    if request.param == "disk":
        options = {**options, "offload_folder": str(tmp_path_factory.mktemp("pages"))}
    return {"cache_implementation": name, "cache_config": {"page_size": 8, **options}}


RESIDENT = {"cache_implementation": "paged_native", "cache_config": {"page_size": 8}}
INT8 = {"cache_implementation": "paged_int8", "cache_config": {"page_size": 8}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(41,), (41, 5, 24)], ids=["one", "padded"])
def test_modes(model, exact, mode, lengths):
    inputs = prompts(*lengths)
    assert_same_run(generate(model, inputs, **MODES[mode], **exact), generate(model, inputs, **MODES[mode]))


DRAFTS = {"few": 3, "a_page_and_more": 11, "a_prefill": 21}


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampling"])
def test_assistant(model, assistant, exact, drafts, sampled):
    assistant.generation_config.num_assistant_tokens = DRAFTS[drafts]
    mode = {"do_sample": sampled, "assistant_model": assistant}
    theirs = generate(model, prompts(41), **mode)
    assert_same_run(generate(model, prompts(41), **mode, **exact), theirs)
    if not sampled:
        assert theirs.sequences.tolist() == generate(model, prompts(41)).sequences.tolist()


@pytest.mark.parametrize("drafts", [2, 10, 24])
def test_prompt_lookup(model, exact, drafts):
    mode = {"prompt_lookup_num_tokens": drafts, "max_matching_ngram_size": 2}
    ours = generate(model, prompts(41), **mode, **exact)
    assert_same_run(ours, generate(model, prompts(41), **mode))
    assert_same_run(ours, generate(model, prompts(41)))


@pytest.mark.parametrize("rows", range(1, 9))
def test_batches(model, rows):
    inputs = prompts(*[30] * rows)
    assert_same_run(generate(model, inputs, **RESIDENT), generate(model, inputs))


@pytest.mark.parametrize("mode", ["greedy", "chunks_of_19"])
def test_each_row_equals_its_own_unpadded_run(model, exact, mode):
    lengths, kwargs = (3, 70, 17, 40), MODES[mode]
    together = generate(model, prompts(*lengths), **kwargs, **exact)
    for row in range(len(lengths)):
        alone = generate(model, own_prompt(prompts(*lengths), row), **kwargs, **exact)
        assert together.sequences[row, -NEW:].tolist() == alone.sequences[0, -NEW:].tolist()
        for step, (logits, expected) in enumerate(zip(together.logits, alone.logits)):
            assert_close(f"row {row}, step {step}", logits[row], expected[0], ROUNDING)


def test_streaming(model):
    streamer = Recorder()
    out = generate(model, prompts(41), streamer=streamer, **RESIDENT)
    assert [token for step in streamer.given for token in step] == out.sequences[0].tolist()
    assert len(streamer.given) == NEW + 1
    assert streamer.ended


def tiny_mistral(**overrides) -> MistralForCausalLM:
    """As `tiny_llama`, of which every layer sees 16 tokens."""
    config = {**tiny_llama().config.to_dict(), "sliding_window": 16, **overrides}
    del config["model_type"], config["architectures"]
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**config)).eval()


@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral])
@pytest.mark.parametrize("mode", ["greedy", "beams", "chunks_of_7", "chunks_of_19"])
@pytest.mark.parametrize("lengths", [(41,), (41, 5)], ids=["one", "padded"])
def test_outputs_of_eager_attention(build, mode, lengths):
    eager, inputs = build(initializer_range=0.2, attn_implementation="eager"), prompts(*lengths)
    wanted = {"output_attentions": True, "output_hidden_states": True, "output_scores": True, **MODES[mode]}
    ours, theirs = generate(eager, inputs, **wanted, **RESIDENT), generate(eager, inputs, **wanted)
    assert_same_run(ours, theirs)
    for step, (scores, expected) in enumerate(zip(ours.scores, theirs.scores, strict=True)):
        assert_close(f"scores of step {step}", scores, expected, ROUNDING)
    for name in ("attentions", "hidden_states"):
        for step, (layers, expected) in enumerate(zip(getattr(ours, name), getattr(theirs, name), strict=True)):
            for index, (got, want) in enumerate(zip(layers, expected, strict=True)):
                tokens = got.shape[-2]
                if step == 0:  # what padding attends to means nothing
                    real = inputs["attention_mask"].bool()[:, -tokens:].repeat_interleave(len(got) // len(lengths), 0)
                    got, want = ((t.transpose(1, 2) if t.ndim == 4 else t)[real] for t in (got, want))
                assert_close(f"{name} of step {step}, {index}", got, want, ROUNDING)


@pytest.mark.parametrize("whole", [True, False], ids=["all_tokens_again", "new_tokens_only"])
@pytest.mark.parametrize("added", [3, 15, 25])
@pytest.mark.parametrize("lengths", [(41,), (41, 5, 24)], ids=["one", "padded"])
def test_three_turns(model, exact, whole, added, lengths):
    name, runs = forward_cache_name(model), []
    for options in (exact, {}):
        ids, mask = prompts(*lengths).values()
        turns = [generate(model, prompts(*lengths), max_new_tokens=11, **options)]
        for turn in range(2):
            cache = turns[-1].past_key_values
            answer = turns[-1].sequences[:, -11:]
            said = torch.randint(3, 128, (len(lengths), added), generator=torch.Generator().manual_seed(turn))
            ids = torch.cat([ids, answer, said], dim=1)
            mask = pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
            inputs = {"input_ids": ids if whole else ids[:, cache.get_seq_length() :], "attention_mask": mask}
            turns.append(generate(model, inputs, max_new_tokens=11, **{name: cache}))
        runs.append(turns)
    for ours, theirs in zip(*runs):
        assert_same_run(ours, theirs)


def test_inputs_embeds(model, exact):
    inputs = prompts(41, 12)
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert_same_run(generate(model, inputs, **exact), generate(model, inputs))


@pytest.mark.parametrize("mode", ["greedy", "beams", "returned", "chunks_of_7"])
def test_a_cache_object_does_what_its_string_does(model, mode):
    string = {"cache_implementation": "paged_native", "cache_config": {"page_size": 16}}
    cache = hf_kvplus.PagedCache(model.config, page_size=16)
    out = generate(model, prompts(41, 7), **MODES[mode], **{forward_cache_name(model): cache})
    assert out.past_key_values is cache
    assert_same_run(out, generate(model, prompts(41, 7), **MODES[mode], **string), 0.0)


# --- int8 ---------------------------------------------------------------------------------------------------------


def divergence(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest KL of the next-token distribution, over rows."""
    expected, logits = log_softmax(expected.detach().double(), -1), log_softmax(logits.double(), -1)
    return float((expected.exp() * (expected - logits)).sum(-1).max())


@pytest.mark.parametrize("mode", [mode for mode in MODES if "beam" not in mode])
@pytest.mark.parametrize("lengths", [(41,), (41, 5, 24)], ids=["one", "padded"])
def test_int8_is_close(model, mode, lengths):
    inputs, kwargs = prompts(*lengths), MODES[mode]
    out = generate(model, inputs, **kwargs, **INT8)
    mask = inputs["attention_mask"].repeat_interleave(len(out.sequences) // len(lengths), 0)
    mask = pad(mask, (0, out.sequences.shape[1] - mask.shape[1]), value=1)
    expected = model(out.sequences, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    for step, logits in enumerate(out.logits):
        assert divergence(logits, expected[:, max(lengths) - 1 + step]) < 5e-3, f"step {step}"


@pytest.mark.parametrize("mode", [mode for mode in MODES if "beam" in mode])
@pytest.mark.parametrize("kind", ["int8", "native"])
def test_beam_scores_are_those_of_the_sequences(model, mode, kind):
    """The scores of the returned beams, recomputed from their tokens without any cache."""
    kwargs = {key: value for key, value in MODES[mode].items() if key != "do_sample"}
    string = {"cache_implementation": f"paged_{kind}", "cache_config": {"page_size": 8}}
    inputs = prompts(41, 24)
    out = generate(model, inputs, output_scores=True, **kwargs, **string)
    start, ends = max(41, 24), kwargs.get("eos_token_id", [])
    mask = inputs["attention_mask"].repeat_interleave(len(out.sequences) // 2, 0)
    mask = pad(mask, (0, out.sequences.shape[1] - start), value=1)
    logits = model(out.sequences, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    chosen = log_softmax(logits[:, start - 1 : -1], -1).gather(-1, out.sequences[:, start:, None])[..., 0]
    for row, score in enumerate(out.sequences_scores):
        tokens = out.sequences[row, start:].tolist()
        length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        expected = chosen[row, :length].sum() / length ** kwargs.get("length_penalty", 1.0)
        assert float(score) == pytest.approx(float(expected.detach()), rel=1e-4 if kind == "native" else 2e-2)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampling"])
def test_int8_with_an_assistant(model, assistant, sampled):
    assistant.generation_config.num_assistant_tokens = 11
    out = generate(model, prompts(41), assistant_model=assistant, do_sample=sampled, **INT8)
    expected = model(out.sequences).logits
    for step, logits in enumerate(out.logits[:NEW]):
        assert divergence(logits, expected[:, 40 + step]) < 5e-3, f"step {step}"


# --- attention implementations and dtypes ----------------------------------------------------------------------------


def halved(module, query, key, value, mask, scaling=None, **kwargs):
    """An attention function of a user's own: not what any of ours computes."""
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling / 2, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def _own_attention():
    AttentionInterface.register("own_masked", halved)
    AttentionMaskInterface.register("own_masked", sdpa_mask)
    AttentionInterface.register("own_unmasked", halved)
    yield
    for name in ("own_masked", "own_unmasked"):
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name, None)


@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral])
@pytest.mark.parametrize("implementation", ["eager", "own_masked", "own_unmasked"])
@pytest.mark.parametrize("mode", ["greedy", "beams", "chunks_of_7", "chunks_of_19"])
@pytest.mark.parametrize("lengths", [(41,), (41, 5)], ids=["one", "padded"])
def test_attention_implementations(build, implementation, mode, lengths):
    model, inputs = build(initializer_range=0.2, attn_implementation=implementation), prompts(*lengths)
    assert_same_run(generate(model, inputs, **MODES[mode], **RESIDENT), generate(model, inputs, **MODES[mode]))


@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral])
@pytest.mark.parametrize("implementation", ["eager", "own_masked", "own_unmasked"])
def test_drafts_under_attention_implementations(build, implementation):
    model, mode = build(initializer_range=0.2, attn_implementation=implementation), {"prompt_lookup_num_tokens": 5}
    assert_same_run(generate(model, prompts(41), **mode, **RESIDENT), generate(model, prompts(41), **mode))


@pytest.mark.parametrize("mode", ["greedy", "beams", "chunks_of_19"])
@pytest.mark.parametrize("lengths", [(41,), (41, 5)], ids=["one", "padded"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:_compile flag")
def test_flex_attention(mode, lengths):
    model = tiny_llama(initializer_range=0.2, attn_implementation="flex_attention", head_dim=16)
    with torch.compiler.set_stance("force_eager"):
        ours, theirs = (generate(model, prompts(*lengths), **MODES[mode], **kwargs) for kwargs in (RESIDENT, {}))
    assert_same_run(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [(41,), (41, 5)], ids=["one", "padded"])
def test_half_precision(dtype, implementation, lengths):
    """No further from float32 than DynamicCache is, forced along the same tokens."""
    model = tiny_llama(initializer_range=0.05, attn_implementation=implementation)
    whole = generate(model, prompts(*lengths))
    model.to(dtype)
    errors = []
    for kwargs in (RESIDENT, {}):
        forced = Forced(whole.sequences[:, max(lengths) :])
        out = generate(model, prompts(*lengths), logits_processor=[forced], **kwargs)
        assert out.sequences.tolist() == whole.sequences.tolist()
        got, want = torch.stack(out.logits).double(), torch.stack(whole.logits).double()
        errors.append(float((got - want).square().mean().sqrt()))
    assert errors[0] <= 1.2 * errors[1]


# --- by hand ----------------------------------------------------------------------------------------------------------


def caches(model, page_size: int = 8):
    """An empty cache of ours and one of transformers'."""
    return hf_kvplus.make_cache("paged_native", model, page_size=page_size), DynamicCache(config=model.config)


def feed(model, cache, ids, mask=None, **kwargs):
    """Logits of `ids`, which follow what `cache` holds."""
    start = cache.get_seq_length()
    if mask is not None and mask.ndim == 2:
        kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, start:]
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=True, **{forward_cache_name(model): cache}, **kwargs).logits


def assert_same_state(ours, theirs) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    for index, (layer, expected) in enumerate(zip(ours.layers, theirs.layers)):
        for name in ("keys", "values"):
            assert_close(f"{name} of layer {index}", getattr(layer, name), getattr(expected, name), ROUNDING)


@pytest.mark.parametrize("count", [1, 5, 8, 20])
def test_rows_chosen_repeated_and_cropped(model, count):
    """Every operation on rows and on the end of the cache, each followed by `count` more tokens."""
    ours, theirs = caches(model)
    operations = [
        lambda cache: None,
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0, 1])),
        lambda cache: cache.crop(-1),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.crop(-13),
        lambda cache: cache.batch_select_indices(torch.tensor([7, 2, 3])),
        lambda cache: cache.crop(0),
        lambda cache: cache.crop(-30),
        lambda cache: cache.reorder_cache(torch.tensor([1, 1, 1])),
        lambda cache: cache.reset(),
    ]
    rows = 4
    for seed, operation in enumerate(operations):
        for cache in (ours, theirs):
            operation(cache)
        rows = {3: 8, 5: 3, 9: 2}.get(seed, rows)
        if seed == 9:
            theirs = DynamicCache(config=model.config)  # its own reset leaves zeros behind
        for length in (count, 11, 1):
            ids = tokens(rows, length, seed)
            assert_close(f"logits after operation {seed}", feed(model, ours, ids), feed(model, theirs, ids), ROUNDING)
        assert_same_state(ours, theirs)


def test_crop_to_nothing_and_start_again(model):
    ours, theirs = caches(model)
    for cache in (ours, theirs):
        feed(model, cache, tokens(2, 29))
        cache.crop(-29)
    ids = tokens(2, 12, seed=5)
    assert_close("logits", feed(model, ours, ids), feed(model, theirs, ids), ROUNDING)
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: cache.fork()], ids=["deepcopy", "fork"])
@pytest.mark.parametrize("length", [5, 16, 29])
def test_copies_go_their_own_ways(model, copied, length):
    ours, theirs = caches(model)
    for cache in (ours, theirs):
        feed(model, cache, tokens(2, length))
    pairs = [(ours, theirs), (copied(ours), copy.deepcopy(theirs)), (copied(ours), copy.deepcopy(theirs))]
    for round in range(3):
        for seed, (left, right) in enumerate(pairs):
            for count in (1, 9, 20):
                ids = tokens(2, count, seed=10 * round + seed)
                assert_close(f"copy {seed}", feed(model, left, ids), feed(model, right, ids), ROUNDING)
            if round == 1:
                left.crop(-2 * seed - 1), right.crop(-2 * seed - 1)
    for left, right in pairs:
        assert_same_state(left, right)


def test_fork_repeats_every_row(model):
    ours, theirs = caches(model)
    for cache in (ours, theirs):
        feed(model, cache, tokens(2, 29))
    forked = ours.fork(3)
    theirs.batch_repeat_interleave(3)
    for count in (1, 9, 20):
        ids = tokens(6, count)
        assert_close("logits", feed(model, forked, ids), feed(model, theirs, ids), ROUNDING)
    assert ours.get_seq_length() == 29
    assert ours.layers[0].rows == 2


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("difference", [3e-3, 1e-3, 1e-4])
def test_only_equal_rows_share_their_pages(difference, scale):
    """Returned sequences that differ little, and are then told the same, keep their own keys and values."""
    layer = PagedLayer(FORMATS["native"], Resident(), page_size=8)
    layer.expansion = 2
    held = torch.zeros(2, 2, 2, 0, 16)
    for count in (24, 40):
        new = scale * torch.randn(2, 1, 2, count, 16)
        new = torch.cat([new, new * (1 + difference * (held.numel() > 0))], dim=1)  # a prompt is the same for both
        layer.update(*new)
        layer.commit()
        held = torch.cat([held, new], dim=3)
    assert_close("keys", layer.keys, held[0], 0.0)
    assert_close("values", layer.values, held[1], 0.0)
    (segment,) = layer.sealed.segments
    shared = (segment.table.ids[0] == segment.table.ids[1]).tolist()
    assert shared == [[True] * 3 + [False] * 5] * 2
