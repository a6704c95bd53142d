"""How the strings reach `generate`, what transformers looks like with and without us, and what a mistake is told."""

import subprocess
import sys

import pytest
import torch
from conftest import tiny_llama
from generating import MODES, assert_same_run, generate, prompts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)
from transformers.cache_utils import DynamicLayer

import hf_kvplus
from hf_kvplus import CacheConfigError, integration, registry
from hf_kvplus._compat import cache_key, forward_cache_name
from hf_kvplus.layer import PagedLayer
from hf_kvplus.placement import Offloaded, Resident
from hf_kvplus.retention.keydiff import KeyDiff
from hf_kvplus.retention.sliding import Sliding

STRINGS = {
    f"{placement}{retention}paged_{format}": (placement, retention, format)
    for placement in ("", "offloaded_")
    for retention in ("", "sliding_", "keydiff_")
    for format in ("native", "int8")
}
OPTIONS = {"sliding_": {"window": 20, "sink_tokens": 2}, "keydiff_": {"budget": 25}, "": {}}


@pytest.fixture(scope="module")
def model():
    return tiny_llama(initializer_range=0.2)


def config_of(name: str) -> dict:
    return {"page_size": 8, **OPTIONS[STRINGS[name][1]]}


def spec_of(cache) -> list:
    """What every layer of `cache` was built from."""
    return [
        (layer.format.summary, layer.format.residual, layer.retention, layer.placement, layer.page_size)
        for layer in cache.layers
    ]


# --- where a string may stand -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRINGS)
def test_make_cache_builds_what_generate_builds(model, name):
    out = generate(model, prompts(40), cache_implementation=name, cache_config=config_of(name))
    cache = hf_kvplus.make_cache(name, model, **config_of(name))
    assert type(cache) is type(out.past_key_values) is hf_kvplus.PagedCache
    assert repr(cache) == repr(out.past_key_values)
    assert (
        spec_of(cache)
        == spec_of(out.past_key_values)
        == spec_of(hf_kvplus.make_cache(name, model.config, **config_of(name)))
    )
    assert_same_run(generate(model, prompts(40), **{forward_cache_name(model): cache}), out, 0.0)


@pytest.mark.parametrize("name", STRINGS)
def test_strings_say_what_they_build(model, name):
    placement, retention, format = STRINGS[name]
    layer = hf_kvplus.make_cache(name, model).layers[0]
    assert type(layer.placement) is (Offloaded if placement else Resident)
    assert type(layer.retention) is {"": type(None), "sliding_": Sliding, "keydiff_": KeyDiff}[retention]
    assert layer.format.summary == registry.FORMATS[format].summary
    assert layer.page_size == 64


def test_available_lists_every_string_with_a_line():
    lines = hf_kvplus.available()
    assert set(STRINGS) <= set(lines)
    assert all(line and "\n" not in line for line in lines.values())
    assert len(set(lines.values())) == len(lines)


PRESETS = {
    "paged_native": (hf_kvplus.PagedCache, {}),
    "paged_int8": (hf_kvplus.QuantizedPagedCache, {}),
    "sliding_paged_native": (hf_kvplus.SlidingPagedCache, {"window": 50, "sink_tokens": 2}),
    "keydiff_paged_native": (hf_kvplus.PrunedPagedCache, {"budget": 30}),
    "offloaded_paged_native": (hf_kvplus.OffloadedPagedCache, {"offload_to": "disk"}),
}


@pytest.mark.parametrize("name", PRESETS)
def test_named_presets(model, name):
    preset, options = PRESETS[name]
    cache = preset(model.config, page_size=16, **options)
    made = hf_kvplus.make_cache(name, model, page_size=16, **options)
    assert isinstance(cache, hf_kvplus.PagedCache)
    assert isinstance(cache, DynamicCache)
    assert spec_of(cache) == spec_of(made)
    ours = generate(model, prompts(40, 7), **{forward_cache_name(model): cache})
    assert_same_run(ours, generate(model, prompts(40, 7), **{forward_cache_name(model): made}), 0.0)


def test_a_cache_without_a_config(model):
    """As code does that knows no model; and from keys and values, as DataParallel rebuilds caches."""
    out = generate(model, prompts(40))
    bare = generate(model, prompts(40), **{forward_cache_name(model): hf_kvplus.PagedCache(page_size=8)})
    assert_same_run(bare, out, 2e-5)
    rebuilt = hf_kvplus.PagedCache(((layer.keys, layer.values) for layer in out.past_key_values.layers), page_size=8)
    for layer, expected in zip(rebuilt.layers, out.past_key_values.layers):
        assert torch.equal(layer.keys, expected.keys)
        assert torch.equal(layer.values, expected.values)


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 128)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


@pytest.fixture
def built(monkeypatch):
    """The caches that `generate` builds for strings of ours."""
    caches, original = [], hf_kvplus.PagedCache.from_cache
    monkeypatch.setattr(
        hf_kvplus.PagedCache,
        "from_cache",
        classmethod(lambda cls, *args: caches.append(original(*args)) or caches[-1]),
    )
    return caches


@pytest.mark.parametrize(
    "name", ["paged_native", "offloaded_paged_native", "sliding_paged_int8", "keydiff_paged_native"]
)
@pytest.mark.parametrize("texts", ["w5 w6 w7 w8", ["w5 w6 w7", "w9 w10 w11 w12 w13 w14 w15 w16 w17 w18"]])
def test_pipeline(model, tokenizer, built, name, texts):
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 30, "do_sample": False, "batch_size": 2}
    ours = write(texts, cache_implementation=name, cache_config={"page_size": 8}, **options)
    assert len(built) == 1
    assert built[0].get_seq_length() >= 33
    if name.endswith("paged_native") and "keydiff" not in name:
        assert ours == write(texts, **options)
    assert len(built) == 1


@pytest.mark.parametrize("name", ["sliding_paged_int8", "offloaded_keydiff_paged_native"])
def test_saved_generation_config(model, built, tmp_path, name):
    given = {"cache_implementation": name, "cache_config": config_of(name), "max_new_tokens": 20, "do_sample": False}
    GenerationConfig(**given, pad_token_id=0).save_pretrained(tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    assert (config.cache_implementation, config.cache_config) == (name, config_of(name))
    for _ in range(2):
        out = model.generate(**prompts(40), generation_config=config)
        assert out.tolist() == model.generate(**prompts(40), **given).tolist()
    assert (config.cache_implementation, config.cache_config) == (name, config_of(name))
    assert [spec_of(cache) for cache in built] == [spec_of(hf_kvplus.make_cache(name, model, **config_of(name)))] * 4


def test_model_saved_with_a_string(built, tmp_path):
    model = tiny_llama()
    model.generation_config.cache_implementation = "keydiff_paged_native"
    model.generation_config.cache_config = {"budget": 0.5, "page_size": 8}
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    out = generate(loaded, prompts(40))
    assert out.past_key_values is built[-1]
    assert built[-1].layers[0].retention == KeyDiff(budget=0.5)


@pytest.mark.parametrize("name", ["paged_native", "sliding_paged_native"])
def test_the_callers_own_objects_stay_as_they_were(model, name):
    config, options = GenerationConfig(max_new_tokens=5, pad_token_id=0), config_of(name)
    before = (config.to_dict(), dict(options))
    model.generate(**prompts(12), generation_config=config, cache_implementation=name, cache_config=options)
    assert (config.to_dict(), options) == before
    assert model.generation_config.cache_implementation is None


# --- assistants, encoders ---------------------------------------------------------------------------------------------


def test_an_assistant_keeps_a_cache_of_transformers(model, built):
    """Whatever the version does with the string: drafts are taken back at any depth, which no eviction may forbid."""
    assistant, caches = tiny_llama(initializer_range=0.2, num_hidden_layers=1), []
    assistant.generation_config.num_assistant_tokens = 12
    hook = assistant.register_forward_pre_hook(
        lambda module, args, kwargs: caches.append(kwargs[cache_key(kwargs)]), with_kwargs=True
    )
    string = {"cache_implementation": "keydiff_paged_native", "cache_config": {"budget": 10}}
    out = generate(model, prompts(40), assistant_model=assistant, **string)
    hook.remove()
    assert {type(cache) for cache in caches} == {DynamicCache}
    assert built == [out.past_key_values]


def tiny_t5():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
    tokens = {"decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **tokens)).eval()


def tiny_bart():
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in
             {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()}  # fmt: skip
    tokens = {"decoder_start_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "forced_eos_token_id": None}
    return BartForConditionalGeneration(BartConfig(d_model=32, vocab_size=128, **sizes, **tokens)).eval()


@pytest.mark.parametrize("build", [tiny_t5, tiny_bart])
@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams", "returned"])
def test_encoder_decoder(build, mode):
    model = build()
    name, inputs = forward_cache_name(model), prompts(40, 7)
    theirs = generate(model, inputs, **MODES[mode])
    ours = generate(model, inputs, **MODES[mode], cache_implementation="paged_native", cache_config={"page_size": 8})
    assert_same_run(ours, theirs)
    cache = EncoderDecoderCache(hf_kvplus.PagedCache(model.config, page_size=8), DynamicCache(config=model.config))
    assert_same_run(generate(model, inputs, **MODES[mode], **{name: cache}), ours, 0.0)
    for both in (ours.past_key_values, cache):
        assert type(both) is EncoderDecoderCache
        assert type(both.self_attention_cache) is hf_kvplus.PagedCache
        assert {type(layer) for layer in both.self_attention_cache.layers} == {PagedLayer}
        assert {type(layer) for layer in both.cross_attention_cache.layers} == {DynamicLayer}


# --- transformers, before and after -----------------------------------------------------------------------------------


def in_a_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_unregister_leaves_transformers_as_it_was():
    in_a_new_process("""
import transformers, transformers.generation.utils, transformers.modeling_utils, transformers.cache_utils
from transformers.generation import configuration_utils

def everything():
    loaded = [module for name, module in sys.modules.items() if name.startswith("transformers.")]
    owners = [module for module in loaded if "_import_structure" not in vars(module)]
    owners += [kind for module in list(owners) for kind in vars(module).values() if isinstance(kind, type)]
    return {(repr(owner), name): value for owner in owners for name, value in list(vars(owner).items())
            if name not in ("__dict__", "__weakref__", "__doc__")}

import sys
from transformers import AttentionInterface, GenerationConfig, GenerationMixin, PreTrainedConfig
from transformers.utils import output_capturing
before = everything()
import hf_kvplus
changed = {key for key, value in everything().items() if key in before and before[key] is not value}
assert 0 < len(changed) < 8, changed
hf_kvplus.register()
assert {key for key, value in everything().items() if key in before and before[key] is not value} == changed
for _ in range(2):
    hf_kvplus.unregister()
    after = everything()
    assert not [key for key in before if after.get(key) is not before[key]]
try:
    GenerationConfig(cache_implementation="paged_int8")
    raise SystemExit("a string of ours is still accepted")
except ValueError:
    pass
hf_kvplus.register()
GenerationConfig(cache_implementation="paged_int8")
""")


def test_importing_is_cheap():
    """Nothing heavy comes in but what transformers itself needs for generating."""
    loaded = in_a_new_process("""
import sys
from transformers import GenerationConfig, PreTrainedConfig
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import AttentionInterface
before = set(sys.modules)
import hf_kvplus
print(*sorted(set(sys.modules) - before), sep="\\n")
""").split()
    packages = {name.split(".")[0] for name in loaded}
    assert "hf_kvplus" in packages
    heavy = {"triton", "numba", "bitsandbytes", "optimum", "matplotlib", "scipy", "pandas", "sklearn", "gguf", "rich"}
    assert not heavy & packages
    assert not [name for name in loaded if name.startswith(("torch.utils.cpp_extension", "torch._inductor"))]


@pytest.fixture
def unregistered():
    hf_kvplus.unregister()
    yield
    hf_kvplus.register()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["none", "dynamic", "static", "user_static"])
@pytest.mark.parametrize("mode", ["greedy", "sampling", "chunks_of_19"])
def test_other_caches_do_as_without_us(unregistered, implementation, kind, mode):
    """Bit for bit."""
    model = tiny_llama(initializer_range=0.2, attn_implementation=implementation)
    runs = []
    for enter in (hf_kvplus.unregister, hf_kvplus.register):
        enter()
        kwargs = {
            "none": {},
            "dynamic": {"cache_implementation": "dynamic"},
            "static": {"cache_implementation": "static"},
            "user_static": {forward_cache_name(model): StaticCache(config=model.config, max_cache_len=80)},
        }[kind]
        runs.append(generate(model, prompts(40, 7), disable_compile=True, **MODES[mode], **kwargs))
    before, after = runs
    assert type(before.past_key_values) is type(after.past_key_values)
    assert_same_run(after, before, 0.0)
    assert not hasattr(after.past_key_values, "spec")


# --- caches of third parties ------------------------------------------------------------------------------------------


class Marked(DynamicCache):
    def __init__(self, config, mark=None):
        super().__init__(config=config)
        self.mark = mark


@pytest.fixture
def third_party():
    hf_kvplus.register_cache_implementation("marked", Marked)
    yield "marked"
    del registry.FACTORIES["marked"]


def test_caches_of_third_parties(model, third_party):
    assert hf_kvplus.available()["marked"] == (Marked.__doc__ or "").split("\n")[0]
    out = generate(model, prompts(40, 7), cache_implementation="marked", cache_config={"mark": 7})
    assert type(out.past_key_values) is Marked
    assert out.past_key_values.mark == 7
    assert_same_run(out, generate(model, prompts(40, 7)), 0.0)
    assert type(hf_kvplus.make_cache("marked", model, mark=3)) is Marked
    bart = tiny_bart()
    out = generate(bart, prompts(20), cache_implementation="marked")
    assert type(out.past_key_values.self_attention_cache) is Marked
    hf_kvplus.unregister()
    try:
        with pytest.raises(ValueError, match="cache_implementation"):
            generate(model, prompts(20), cache_implementation="marked")
    finally:
        hf_kvplus.register()
    assert type(generate(model, prompts(20), cache_implementation="marked").past_key_values) is Marked


@pytest.mark.parametrize(
    "taken", ["paged", "dynamic", "static", "paged_int8", "offloaded_sliding_paged_native", 3, None]
)
def test_names_that_third_parties_cannot_take(taken):
    with pytest.raises(CacheConfigError, match="`name`: got"):
        hf_kvplus.register_cache_implementation(taken, Marked)


def test_a_factory_must_be_callable():
    with pytest.raises(CacheConfigError, match=r"`factory`: got 'Marked', accepted: a function of \(config"):
        hf_kvplus.register_cache_implementation("marked", "Marked")
    assert "marked" not in hf_kvplus.available()


# --- mistakes ---------------------------------------------------------------------------------------------------------

WRONG_STRINGS = {
    "paged_int9": "paged_int8",
    "page_int8": "paged_int8",
    "paged-native": "paged_native",
    "sliding_int8": "sliding_paged_int8",
    "offload_paged_int8": "offloaded_paged_int8",
    "offloaded_keydif_paged_native": "offloaded_keydiff_paged_native",
    "Paged_Native": "paged_native",
    "paged_sliding_int8": "sliding_paged_int8",
    "keydiff_offloaded_paged_int4": "offloaded_keydiff_paged_int4",
}


@pytest.mark.parametrize("given", WRONG_STRINGS)
@pytest.mark.parametrize(
    "use",
    [
        lambda model, given: generate(model, prompts(10), cache_implementation=given),
        lambda model, given: GenerationConfig(cache_implementation=given),
        lambda model, given: hf_kvplus.make_cache(given, model),
    ],
    ids=["generate", "config", "make_cache"],
)
def test_wrong_strings(model, given, use):
    meant = WRONG_STRINGS[given]
    message = rf"`cache_implementation`: got '{given}', accepted: \[offloaded_\].*Did you mean '{meant}'\?.*available"
    with pytest.raises(ValueError, match=message):
        use(model, given)


WRONG_OPTIONS = [
    ("paged_int8", {"pagesize": 8}, "`cache_config`: got the key 'pagesize' with 'paged_int8', accepted: page_size"),
    ("paged_int8", {"pagesize": 8}, "Did you mean 'page_size'"),
    ("paged_int8", {"window": 8}, "got the key 'window'.*'window' belongs to strings with sliding_"),
    ("sliding_paged_int8", {"budget": 8}, "got the key 'budget'.*'budget' belongs to strings with keydiff_"),
    ("paged_native", {"offload_to": "cpu"}, "got the key 'offload_to'.*belongs to strings with offloaded_"),
    ("paged_int8", {"page_size": 48}, "`page_size`: got 48, accepted: one of 8, 16, 32, 64, 128, 256"),
    ("paged_int8", {"page_size": 512}, "`page_size`: got 512, accepted"),
    ("paged_int8", {"page_size": "64"}, "`page_size`: got '64', accepted"),
    ("paged_int8", {"page_size": 64.0}, "`page_size`: got 64.0, accepted"),
    ("paged_int8", {"page_size": True}, "`page_size`: got True, accepted"),
    ("sliding_paged_native", {"window": 0}, "`window`: got 0, accepted: a whole number of tokens from 1"),
    ("sliding_paged_native", {"window": 1.5}, "`window`: got 1.5, accepted"),
    ("sliding_paged_native", {"sink_tokens": -1}, "`sink_tokens`: got -1, accepted: a whole number of tokens from 0"),
    ("keydiff_paged_native", {"budget": 0}, "`budget`: got 0, accepted: a whole number .* or a fraction"),
    ("keydiff_paged_native", {"budget": 1.0}, "`budget`: got 1.0, accepted"),
    ("keydiff_paged_native", {"budget": "half"}, "`budget`: got 'half', accepted"),
    ("offloaded_paged_native", {"offload_to": "dsk"}, "`offload_to`: got 'dsk', accepted: cpu, disk.* 'disk'"),
    ("offloaded_paged_native", {"offload_folder": "."}, "`offload_folder`: .*only `offload_to='disk'` writes files"),
    ("offloaded_paged_native", {"offload_to": "disk", "offload_folder": "/no"}, "`offload_folder`: got '/no'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "message"), WRONG_OPTIONS)
def test_wrong_options(model, name, options, message):
    with pytest.raises(CacheConfigError, match=message):
        generate(model, prompts(10), cache_implementation=name, cache_config=options)
    with pytest.raises(CacheConfigError, match=message):
        hf_kvplus.make_cache(name, model, **options)


@pytest.mark.parametrize("options", [{"format": "int9"}, {"retention": "slidng"}, {"placement": "offload"}])
def test_wrong_parts_of_a_cache_object(model, options):
    ((argument, given),) = options.items()
    with pytest.raises(CacheConfigError, match=f"`{argument}`: got '{given}', accepted: .*Did you mean"):
        hf_kvplus.PagedCache(model.config, **options)


@pytest.mark.parametrize(
    "options", [{"retention": 3}, {"placement": True}, {"format": None}, {"config": "llama"}, {"config": 3}]
)
def test_parts_of_the_wrong_type(model, options):
    (argument,) = options
    with pytest.raises(ValueError, match=f"`{argument}`: got"):
        hf_kvplus.PagedCache(**{"config": model.config, **options})


def test_make_cache_wants_a_model_or_a_config():
    with pytest.raises(CacheConfigError, match="`model_or_config`: got 'str', accepted: a model or its config"):
        hf_kvplus.make_cache("paged_int8", "llama")


def test_a_cache_and_a_string(model):
    cache = hf_kvplus.PagedCache(model.config)
    with pytest.raises(ValueError, match=r"Passing both `cache_implementation` .* and `.*` \(a Cache object\)"):
        generate(model, prompts(10), cache_implementation="paged_int8", **{forward_cache_name(model): cache})
    assert cache.get_seq_length() == 0


def test_a_cache_for_other_rows(model):
    cache = hf_kvplus.PagedCache(model.config)
    generate(model, prompts(10, 10), **{forward_cache_name(model): cache})
    with pytest.raises(ValueError, match="has 3 rows, but this cache holds 2 sequences"):
        generate(model, prompts(60, 60, 60), **{forward_cache_name(model): cache})


def test_the_registry_is_told_apart_from_transformers(model):
    """Strings of transformers go where they always went."""
    assert set(integration._compat.valid_strings()).isdisjoint(hf_kvplus.available())
    assert type(generate(model, prompts(10), cache_implementation="dynamic").past_key_values) is DynamicCache
    with pytest.raises(ValueError, match="cache_implementation"):
        GenerationConfig(cache_implementation="nonsense").validate(strict=True)


def test_hub_kernels_wrap_no_attention_function():
    """Of transformers 5.25 they are on by default: decoding still reads the pages."""
    hub = pytest.importorskip("transformers.integrations.hub_kernels")
    if not hasattr(hub, "get_kernel_mapping_transformers") or not hub.is_kernels_available():
        pytest.skip("hub kernels are not on by default")
    replaced = {name for name in hub.get_kernel_mapping_transformers() if "attention" in name.lower()}
    assert replaced <= {"MultiScaleDeformableAttention"}  # of images: it has no cache
    model = tiny_llama(initializer_range=0.2)
    expected = generate(model, prompts(40, 7), cache_implementation="paged_int8")
    model.set_use_kernels(True)
    assert model.use_kernels
    before = PagedLayer.dense_reads
    assert_same_run(generate(model, prompts(40, 7), cache_implementation="paged_int8"), expected, 0.0)
    assert PagedLayer.dense_reads == before
