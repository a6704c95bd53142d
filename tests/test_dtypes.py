"""Keys, values and queries in dtypes of their own: under autocast, in mixed precision, after `model.to(dtype)`."""

import contextlib
import copy
import functools

import pytest
import torch
from generating import NEW, generate, main_model, prompts, tokens
from layers import layer_of
from numerics import assert_close, relative_rms
from torch.nn.functional import pad
from transformers import DynamicCache, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

from hf_kvplus import make_cache, registry
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.formats import FORMATS


def with_their_library(build, names):
    """The names of formats, or strings, whose library is installed if they need one."""
    found = []
    for name in names:
        with contextlib.suppress(ImportError):
            build(name)
            found.append(name)
    return found


STRINGS = with_their_library(lambda name: registry.parse(name, {}), registry.names())
HALVES = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 0.02, torch.float16: 0.005}  # relative RMS of logits: what autocast itself rounds


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request):
    model = main_model()
    model.set_attn_implementation(request.param)
    return model


def make(name, model):
    """The cache of a string (`None`: DynamicCache) that keeps all tokens of these tests."""
    if name is None:
        return DynamicCache(config=model.config)
    kept = {"budget": 500} if "keydiff" in name else {"window": 500} if "sliding" in name else {}
    return make_cache(name, model, page_size=16, **kept)


@torch.no_grad()
def logits_of(model, cache, between=lambda: None):
    """Logits of a padded batch: a prompt, steps, rows reordered as by beams, a second turn, steps."""
    inputs, rows, found = prompts(50, 41, 7), torch.tensor([1, 1, 2]), []
    mask = inputs["attention_mask"]

    def give(ids):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        arguments = {"attention_mask": mask, "position_ids": positions, forward_cache_name(model): cache}
        found.append(model(ids, **arguments).logits.float()[mask[:, -ids.shape[1] :].bool()])

    give(inputs["input_ids"])
    for step in range(20):
        mask = pad(mask, (0, 1), value=1)
        give(tokens(3, 1, step))
    cache.reorder_cache(rows)
    between()
    mask = pad(mask[rows], (0, 19), value=1)
    give(tokens(3, 19, 99))
    for step in range(3):
        mask = pad(mask, (0, 1), value=1)
        give(tokens(3, 1, step))
    return torch.cat(found)


@pytest.fixture(scope="module")
def exact(model):
    """The logits of every string, and DynamicCache's, in float32."""
    return {name: logits_of(model, make(name, model)) for name in (*STRINGS, None)}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_string_under_autocast(model, exact, dtype):
    """No string is further from DynamicCache than it is without autocast, but for what autocast rounds."""
    with torch.autocast("cpu", dtype=dtype):
        found = {name: logits_of(model, make(name, model)) for name in (*STRINGS, None)}
    for name, logits in found.items():
        assert logits.isfinite().all(), name
        allowed = 1.2 * relative_rms(exact[name], exact[None]) + ROUNDING[dtype]
        assert relative_rms(logits, found[None]) <= allowed, name


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3, "output_scores": True}, {"output_attentions": True}], ids=str)
@pytest.mark.parametrize("name", ["paged_native", "offloaded_paged_native", "paged_int8"])
def test_generate_under_autocast(model, name, mode):
    """The logits, and the scores of beams, are those of the sequences that come out (rounded: tokens may tie)."""
    if mode.get("output_attentions") and model.config._attn_implementation != "eager":
        pytest.skip("only eager attention gives weights back")
    inputs = prompts(40, 31)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = generate(model, inputs, cache_implementation=name, **mode)
    mask = pad(inputs["attention_mask"], (0, NEW), value=1)
    with torch.no_grad():
        logits = model(out.sequences, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    logits = logits[:, -NEW - 1 : -1]
    if mode.get("num_beams"):
        chosen = logits.log_softmax(-1).gather(-1, out.sequences[:, -NEW:, None])
        assert_close("scores", out.sequences_scores, chosen.mean((1, 2)), 0.03)
    else:
        assert_close("logits", torch.stack(out.logits, 1).float(), logits, 0.03)


def test_every_string_after_the_model_has_changed_its_dtype(model, exact):
    """A layer keeps the dtypes in which it began, and serves the model in the new one (DynamicCache raises)."""
    for dtype in HALVES:
        # The second turn in half precision, by a cache that was filled in half precision.
        half = copy.deepcopy(model).to(dtype)
        theirs = logits_of(half, DynamicCache(config=model.config))
        for name in STRINGS:
            moved, cache = copy.deepcopy(model), make(name, model)
            logits = logits_of(moved, cache, between=functools.partial(moved.to, dtype))
            allowed = 1.2 * relative_rms(exact[name], exact[None]) + 2 * ROUNDING[dtype]
            assert relative_rms(logits, theirs) <= allowed, name
            if name == "paged_native":
                assert {cache.layers[0].keys.dtype, cache.layers[0].values.dtype} == {torch.float32}


@pytest.mark.parametrize("name", with_their_library(lambda name: FORMATS[name].with_options(), FORMATS))
def test_codes_do_not_depend_on_autocast(name):
    """Equal tokens are stored in equal bytes and read as equal numbers, inside of autocast and outside."""
    plain, within = layer_of(name, page_size=16), layer_of(name, page_size=16)
    for step, new in enumerate((50, *[1] * 30)):
        keys, values = torch.randn(2, 2, 2, new, 16, generator=torch.Generator().manual_seed(step))
        for layer, enabled in ((plain, False), (within, True)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                layer.update(keys, values.bfloat16())
                layer.commit()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within.crop(-25)
        read = within.fork(2).keys[::2], within.values
    plain.crop(-25)
    assert torch.equal(plain.keys, read[0])
    assert torch.equal(plain.values, read[1])
    assert [x.dtype for x in read] == [torch.float32, torch.bfloat16]


def tiny_t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["paged_native", "paged_int8"])
def test_models_that_keep_modules_in_float32(name, dtype):
    model = tiny_t5().eval().to(dtype)
    for layer in (*model.encoder.block, *model.decoder.block):
        layer.layer[-1].DenseReluDense.wo.float()  # `_keep_in_fp32_modules`
    theirs = generate(model, prompts(30, 21), max_new_tokens=20)
    ours = generate(model, prompts(30, 21), max_new_tokens=20, cache_implementation=name)
    for found, expected in zip(ours.logits, theirs.logits):
        assert_close("logits", found.float(), expected.float(), ROUNDING[dtype])


def test_prediction_with_generate_in_a_trainer(tmp_path):
    model = tiny_t5()
    rows = [{name: x[0] for name, x in prompts(length).items()} for length in (12, 12)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    found = []
    for name in (None, "paged_native", "paged_int8"):
        model.generation_config.cache_implementation = name
        options = {"per_device_eval_batch_size": 2, "report_to": [], "use_cpu": True, "bf16": True}
        options |= {"predict_with_generate": True, "generation_max_length": 30}
        trainer = Seq2SeqTrainer(model=model, args=Seq2SeqTrainingArguments(str(tmp_path), **options))
        found.append(trainer.predict(rows).predictions.tolist())
    assert found[1] == found[0]
    assert found[2] == found[0]
