"""Models dispatched with accelerate: the same tokens as without, and pages where each layer computes."""

import accelerate
import pytest
import torch
from conftest import tiny_llama
from numerics import assert_close
from transformers import LlamaForCausalLM

from hf_kvplus._compat import forward_cache_name

PAGES = {"page_size": 8}
STRINGS = {
    "paged_native": {},
    "paged_int8": {},
    "offloaded_paged_native": {"offload_to": "disk"},
    "sliding_paged_int8": {"window": 16},
    "keydiff_paged_native": {"budget": 16},
}
PARTS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "model.rotary_emb"]


def plain() -> LlamaForCausalLM:
    return tiny_llama(initializer_range=0.2, num_hidden_layers=3)


def cpu_offload(folder):
    return accelerate.cpu_offload(plain(), execution_device=torch.device("cpu"))


def disk_offload(folder):
    return accelerate.disk_offload(plain(), str(folder), execution_device=torch.device("cpu"))


def dispatch(folder):
    """The first and the last layer in memory, the middle one and the head on disk."""
    places = dict(zip(PARTS, ["cpu", "cpu", "disk", "cpu", "cpu", "cpu"]), lm_head="disk")
    return accelerate.dispatch_model(plain(), places, main_device="cpu", offload_dir=str(folder))


def device_map(folder):
    return loaded(folder, {"": "cpu"})


def device_map_with_disk(folder):
    return loaded(folder, dict(zip(PARTS, ["cpu", "cpu", "disk", "disk", "cpu", "cpu"]), lm_head="cpu"))


def loaded(folder, places):
    plain().save_pretrained(folder / "saved")
    return LlamaForCausalLM.from_pretrained(
        folder / "saved", device_map=places, offload_folder=str(folder / "weights"), dtype=torch.float32
    ).eval()


def generate(model, string=None, device="cpu", **kwargs):
    torch.manual_seed(0)
    ids = torch.randint(3, 128, (2, 29), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(29) >= torch.tensor([[0], [11]])
    if string is not None:
        kwargs.update(cache_implementation=string, cache_config={**PAGES, **STRINGS[string]})
    return model.generate(
        ids.to(device),
        attention_mask=mask.long().to(device),
        max_new_tokens=20,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **kwargs,
    )


def assert_same(out, reference, tolerance=2e-5) -> None:
    assert out.sequences.tolist() == reference.sequences.tolist()
    assert_close("logits", torch.stack(out.logits).cpu(), torch.stack(reference.logits).cpu(), tolerance)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("string", STRINGS)
@pytest.mark.parametrize("way", [cpu_offload, disk_offload, dispatch, device_map, device_map_with_disk])
def test_dispatched_model(way, string, beams, tmp_path):
    reference = generate(plain(), string, num_beams=beams)
    model = way(tmp_path)
    out = generate(model, string, num_beams=beams)
    assert_same(out, reference)
    cache = out.past_key_values
    assert [layer.device.type for layer in cache.layers] == ["cpu"] * 3
    assert set(cache.stats().bytes_by_tier) == ({"cpu", "disk"} if "offloaded" in string else {"cpu"})
    assert cache.stats().pages > 0


@pytest.mark.parametrize("way", [cpu_offload, disk_offload, dispatch])
def test_second_turn_on_the_cache_of_a_dispatched_model(way, tmp_path):
    model, untouched = way(tmp_path), plain()
    turns = []
    for each in (model, untouched):
        first = generate(each, "paged_native")
        more = torch.cat([first.sequences, first.sequences[:, :9]], dim=1)
        mask = torch.ones_like(more)
        mask[1, :11] = 0
        turns.append(
            each.generate(
                more,
                attention_mask=mask,
                max_new_tokens=10,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **{forward_cache_name(each): first.past_key_values},
            )
        )
    assert_same(*turns)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("string", STRINGS)
def test_weights_on_the_cpu_pages_where_they_run(string):
    """accelerate brings the weights of layer 1 to the GPU for each call: its pages live there as well."""
    places = dict(zip(PARTS, [0, 0, "cpu", 0, 0, 0]), lm_head=0)
    model = accelerate.dispatch_model(plain(), places, main_device=0)
    out = generate(model, string, device="cuda")
    assert_same(out, generate(plain().cuda(), string, device="cuda"))
    assert [str(layer.device) for layer in out.past_key_values.layers] == ["cuda:0"] * 3
