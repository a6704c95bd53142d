"""PI0.5 samples actions by a loop of its own: it crops the cache of its prompt after each, and is handed ours."""

import pytest
import tiny_models as tiny
import torch
import transformers
from numerics import assert_close
from transformers import CONFIG_MAPPING

import hf_kvplus

if "pi05" not in CONFIG_MAPPING:
    pytest.skip(f"transformers {transformers.__version__} has no pi05", allow_module_level=True)

TEXT = {"model_type": "gemma", **tiny._TEXT_PART, "head_dim": 16, "num_key_value_heads": 1}
VLM = {**tiny.MULTIMODAL["paligemma"], "model_type": "paligemma", "text_config": TEXT}
VLM = {"image_token_id" if key == "image_token_index" else key: value for key, value in VLM.items()}
CHUNK = 6


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = CONFIG_MAPPING["pi05"](vlm_config=VLM, dit_config=TEXT, chunk_size=CHUNK, max_action_dim=4)
    model = transformers.PI05ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter.data, std=0.15)
    return model


def sample(model, cache=None, lengths=(21, 21)):
    """The actions; the prompt goes into `cache`, if one is given."""
    given = {} if cache is None else {"cache": cache}
    hook = model.model.vlm.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, **given}), with_kwargs=True
    )
    generator, rows = torch.Generator().manual_seed(1), len(lengths)
    ids = torch.randint(3, tiny.VOCABULARY - 4, (rows, max(lengths)), generator=generator)
    ids[:, -6:-2] = tiny._IMAGE_TOKEN
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    try:
        return model.sample_actions(
            input_ids=ids.masked_fill(~mask, 0),
            attention_mask=mask.long(),
            pixel_values=torch.randn(rows, 1, 3, 16, 16, generator=generator),
            pixel_attention_mask=torch.ones(rows, 1, dtype=torch.bool),
            noise=torch.randn(rows, CHUNK, 4, generator=generator),
            num_steps=4,
        )
    finally:
        hook.remove()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [(21, 21), (21, 13)], ids=["even", "padded"])
@pytest.mark.parametrize("placement", [None, "offloaded"])
def test_actions(model, lengths, attention, placement):
    model.set_attn_implementation(attention)
    cache = hf_kvplus.PagedCache(model.config.vlm_config.text_config, page_size=8, placement=placement)
    assert_close("actions", sample(model, cache, lengths), sample(model, lengths=lengths), 2e-5)
    assert cache.get_seq_length() == max(lengths)  # what was denoised is taken back
    assert cache.stats().pages > 0


def test_int8(model):
    cache = hf_kvplus.PagedCache(model.config.vlm_config.text_config, format="int8", page_size=8)
    assert_close("actions", sample(model, cache), sample(model), 0.02)


def test_a_window_that_is_wide_enough(model):
    config = model.config.vlm_config.text_config
    cache = hf_kvplus.PagedCache(config, retention="sliding", window=500, page_size=8)
    assert_close("actions", sample(model, cache), sample(model), 2e-5)
