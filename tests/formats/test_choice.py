"""Which format each layer's keys and values get, and what is said when it cannot be told."""

import json
import re

import pytest
import torch
from conftest import tiny_llama
from numerics import relative_rms
from transformers import GenerationConfig

import hf_kvplus
from hf_kvplus import CacheConfigError
from hf_kvplus.formats import FORMATS, FormatSpec, PageFormat, register_format
from hf_kvplus.formats.fp8 import Fp8Format
from hf_kvplus.formats.integer import Int2Format, Int4Format, Int8Format
from hf_kvplus.formats.native import NativeFormat


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_hidden_layers=4)


def formats_of(cache) -> list[tuple[type, type]]:
    """Classes of the key and value format of every layer."""
    pairs = [(layer.format.key, layer.format.value) for layer in cache.paged_layers]
    return [tuple(type(build(64, 64, torch.float32, channel_major=True)) for build in pair) for pair in pairs]


def test_by_layer(model):
    cache = hf_kvplus.make_cache("paged_int4", model, format_by_layer={0: "native", "2": "k4v2", -1: "int8"})
    assert formats_of(cache) == [
        (NativeFormat, NativeFormat),
        (Int4Format, Int4Format),
        (Int4Format, Int2Format),
        (Int8Format, Int8Format),
    ]
    assert [layer.format.native_pages for layer in cache.paged_layers] == [0, 1, 1, 0]


def test_keys_and_values_apart(model):
    cache = hf_kvplus.PagedCache(model.config, format="int8", k_format="int2", format_by_layer={1: "fp8"})
    assert formats_of(cache) == [(Int2Format, Int8Format), (Fp8Format, Fp8Format), *[(Int2Format, Int8Format)] * 2]
    assert (cache.layers[0].format.residual, cache.layers[0].format.native_pages) == (64, 1)  # the more careful half's
    cache = hf_kvplus.make_cache("paged_native", model, v_format="int4", rotation=False, residual=5, native_pages=0)
    assert formats_of(cache) == [(NativeFormat, Int4Format)] * 4
    layer = cache.layers[0]
    assert (layer.format.residual, layer.format.native_pages) == (5, 0)
    assert layer.format.value(64, 64, torch.float32, channel_major=False).rotation == 0


def test_a_saved_config_means_the_same(model, tmp_path):
    config = {"page_size": 8, "format_by_layer": {0: "native", -1: "int8"}, "k_format": "int4", "rotation": False}
    generation = GenerationConfig(
        cache_implementation="paged_k4v2", cache_config=config, max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    generation.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["cache_config"]["format_by_layer"] == {
        "0": "native",
        "-1": "int8",
    }
    ids = torch.randint(3, 128, (2, 60))
    call = {"return_dict_in_generate": True, "output_logits": True}
    ours, theirs = (model.generate(ids, generation_config=each, **call) for each in (loaded, generation))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits))
    assert formats_of(ours.past_key_values) == [
        (NativeFormat, NativeFormat),
        *[(Int4Format, Int2Format)] * 2,
        (Int8Format, Int8Format),
    ]
    plain = model.generate(
        ids,
        max_new_tokens=12,
        do_sample=False,
        cache_implementation="paged_k4v2",
        cache_config={"page_size": 8},
        **call,
    )
    assert relative_rms(plain.logits[1], ours.logits[1]) > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int3"}, "`format`: got 'int3', accepted: .*Did you mean 'int"),
        ({"format": ["int8"]}, "`format`: got ['int8'], accepted: "),
        ({"k_format": "int5"}, "`k_format`: got 'int5', accepted: .*native"),
        ({"v_format": 4}, "`v_format`: got 4, accepted: "),
        ({"format_by_layer": {0: "int9"}}, "`format_by_layer`: got 'int9', accepted: "),
        ({"format_by_layer": ["int8"]}, "`format_by_layer`: got ['int8'], accepted: a dict"),
        ({"format_by_layer": {"first": "int8"}}, "`format_by_layer`: got 'first', accepted: whole numbers"),
        ({"format_by_layer": {True: "int8"}}, "`format_by_layer`: got True, accepted: whole numbers"),
        ({"format_by_layer": {1.0: "int8"}}, "`format_by_layer`: got 1.0, accepted: whole numbers"),
        ({"format_by_layer": {4: "int8"}}, "`format_by_layer`: got 4, accepted: layers from -4 to 3"),
        ({"format_by_layer": {-5: "int8"}}, "`format_by_layer`: got -5, accepted: layers from -4 to 3"),
        ({"format_by_layer": {1: "int8", "1": "int4"}}, "every layer once"),
        ({"format_by_layer": {3: "int8", -1: "int4"}}, "every layer once"),
        ({"residual": -1}, "`residual`: got -1, accepted: a whole number of tokens from 0"),
        ({"residual": 1.5}, "`residual`: got 1.5, accepted"),
        ({"native_pages": True}, "`native_pages`: got True, accepted: a whole number of pages from 0"),
        ({"format": "int4", "rotation": "yes"}, "`rotation`: got 'yes', accepted: True or False"),
        ({"rotation": False}, "the key 'rotation', accepted: .* 'rotation' belongs to the formats .*int4"),
        ({"format": "int4", "rotatoin": False}, "the key 'rotatoin', accepted: .*Did you mean 'rotation'"),
    ],
)
def test_what_is_not_accepted(model, options, message):
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(CacheConfigError, match=pattern):
        hf_kvplus.PagedCache(model.config, **options)


def test_by_layer_needs_to_know_the_layers():
    with pytest.raises(CacheConfigError, match="`config`: got None, accepted: with `format_by_layer`, the config"):
        hf_kvplus.PagedCache(format="int8", format_by_layer={0: "native"})


def test_a_format_of_ones_own(model):
    """A format and its option, registered, are part of the strings and of what `cache_config` accepts."""

    class Rounded(PageFormat):
        def __init__(self, page_size, dim, dtype, channel_major, digits=1):
            super().__init__(page_size, dim, dtype, channel_major)
            self.digits = digits

        @property
        def parts(self):
            return {"data": (self.page_shape, torch.float32)}

        def encode(self, pages):
            data = pages.float().round(decimals=self.digits)
            return {"data": data.mT if self.channel_major else data}

        def decode(self, parts, dtype=None):
            data = parts["data"].mT if self.channel_major else parts["data"]
            return data.to(dtype or self.dtype)

    register_format("rounded", FormatSpec(Rounded, Rounded, "rounded", options=("digits",)))
    try:
        keys = torch.randn(1, 2, 64, 16)
        cache = hf_kvplus.make_cache("paged_rounded", model, digits=2)
        cache.update(keys, keys, 0)
        cache.layers[0].commit()
        torch.testing.assert_close(cache.layers[0].keys, keys.round(decimals=2))
        assert hf_kvplus.available()["paged_rounded"] == "rounded"
    finally:
        del FORMATS["rounded"]
