"""What makes careless formats collapse: keys with a large bias on a few channels, and slots that hold no token."""

import pytest
import torch
from layers import layer_of
from numerics import relative_rms
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import hf_kvplus
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.formats import FORMATS, FormatSpec, PageFormat, register_format
from hf_kvplus.ops.decode_attention import decode_attention

FORMATS_OF_FEW_BITS = {"int4": 0.2, "k4v2": 0.5, "int2": 0.75}


class PlainFormat(PageFormat):
    """4 bits, a scale and a zero per token: as keys should not be written. Keeps the rounded numbers themselves."""

    @property
    def parts(self):
        return {"data": (self.page_shape, torch.float32)}

    def encode(self, pages):
        low, high = torch.aminmax(pages.float(), dim=-1, keepdim=True)
        step = (high - low) / 15
        data = ((pages.float() - low) / step).round() * step + low
        return {"data": data.mT if self.channel_major else data}

    def decode(self, parts, dtype=None):
        data = parts["data"].mT if self.channel_major else parts["data"]
        return data.to(dtype or self.dtype)


@pytest.fixture(scope="module", autouse=True)
def plain():
    register_format("plain4", FormatSpec(PlainFormat, PlainFormat, "per token", native_pages=1))
    yield
    del FORMATS["plain4"]


@pytest.mark.parametrize("size", [30, 100, 400])
def test_attention_over_biased_keys(size):
    """Errors of the output with bias and without: ours stay where they were, per-token keys lose everything."""
    keys, values = torch.randn(2, 1, 2, 512, 64)
    query = torch.randn(1, 4, 3, 64)
    biased = keys.clone()
    biased[..., [5, 40, 41]] += torch.tensor([1.0, -0.7, 0.5]) * size

    def error(format, keys):
        layer = layer_of(format, native_pages=0, residual=0)
        layer.update(keys, values)
        layer.commit()
        out = decode_attention(query, layer.sealed.view(), *layer.unsealed(), scale=64**-0.5)
        exact = scaled_dot_product_attention(query, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1))
        return relative_rms(out, exact.transpose(1, 2))

    for format, largest in FORMATS_OF_FEW_BITS.items():
        assert error(format, biased) < min(1.5 * error(format, keys), largest)
    assert error("plain4", keys) < 0.2
    assert error("plain4", biased) > 1


@pytest.mark.parametrize("format", ["int8", *FORMATS_OF_FEW_BITS])
@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_attention_over_keys_and_values_of_1e4(format, size, backend):
    """Rotated, some channels are beyond float16; where they are below, scales are negative."""
    layer = layer_of(format, native_pages=0, residual=0)
    tokens = size * (1 + torch.arange(128.0) / 1e4)[:, None].expand(1, 2, 128, 64)
    layer.update(tokens, tokens)
    layer.commit()
    out = decode_attention(
        torch.randn(1, 4, 3, 64), layer.sealed.view(), *layer.unsealed(), scale=1e-5, backend=backend
    )
    assert (out / size - 1).abs().max() < 0.02


@pytest.mark.parametrize("size", [100, 400])
def test_a_model_whose_key_projection_is_biased(size):
    """As in Qwen2.5-7B. On channels that RoPE turns slowly, so that the bias stays where it is."""
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.06,
    )
    model = Qwen2ForCausalLM(config).eval()
    ids, name = torch.randint(0, 128, (1, 400)), forward_cache_name(model)

    @torch.inference_mode()
    def logits(cache):
        model(ids[:, :380], **{name: cache})
        return model(ids[:, 380:], **{name: cache}).logits

    def error(format):
        return relative_rms(logits(hf_kvplus.make_cache(f"paged_{format}", model)), logits(DynamicCache(config=config)))

    formats = ["plain4", *FORMATS_OF_FEW_BITS]
    before = {format: error(format) for format in formats}
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.view(2, 64)
            bias[:, [31, 63, 62]] += torch.tensor([1.0, -0.7, 0.5]) * size
    after = {format: error(format) for format in formats}
    for format, largest in FORMATS_OF_FEW_BITS.items():
        assert after[format] < min(1.5 * before[format], largest)
    assert before["plain4"] < 0.2
    assert after["plain4"] > 0.6


@pytest.mark.parametrize("format", ["int4", "k4v2", "int2", "quanto_int4", "nf4"])
@pytest.mark.parametrize(("start", "stop"), [(0, 20), (20, 40)])
def test_padding_does_not_widen_the_range_of_the_others(format, start, stop):
    """Tokens of a page that holds padding too are as near as with a token like themselves in its place."""
    if format in ("nf4", "quanto_int4"):
        pytest.importorskip("bitsandbytes" if format == "nf4" else "optimum.quanto")
    padding = torch.zeros(1, 64, dtype=torch.bool)
    padding[0, start:stop] = True
    keys = 40 + torch.randn(1, 2, 64, 64)

    def errors(keys, padding):
        layer = layer_of(format, native_pages=0, residual=0)
        layer.update(keys, keys)
        layer.commit(padding)
        real = [*range(start), *range(stop, 64)]
        return [relative_rms(layer.dense(name)[:, :, real] - 40, keys[:, :, real] - 40) for name in ("keys", "values")]

    spoilt = keys.masked_fill(padding[:, None, :, None], 0)
    for with_padding, without in zip(errors(spoilt, padding), errors(keys, None)):
        assert with_padding < 1.2 * without
