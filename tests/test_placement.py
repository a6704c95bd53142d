"""Pages in CPU memory and in files: the same pages, moved encoded and ahead of time, and gone with the cache."""

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import give, layer_of
from numerics import poisoned

import hf_kvplus.attention
from hf_kvplus import CacheConfigError, OffloadedPagedCache, make_cache
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.placement import Offloaded, Resident
from hf_kvplus.placement.offloaded import DiskStorage, HostStorage

LAYOUT = {
    "keys.data": ((6, 4), torch.int8),
    "keys.scale": ((4,), torch.float16),
    "values.data": ((4, 10), torch.float8_e4m3fn),
    "values.rest": ((3,), torch.bfloat16),
    "empty": ((0,), torch.float32),
}
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STORAGES = [
    pytest.param(lambda: Offloaded("cpu").storage(LAYOUT, torch.device("cpu")), id="cpu"),
    pytest.param(lambda: Offloaded("disk").storage(LAYOUT, torch.device("cpu")), id="disk"),
    pytest.param(lambda: Offloaded("cpu").storage(LAYOUT, torch.device("cuda")), id="cpu of cuda", marks=gpu),
    pytest.param(lambda: Offloaded("disk").storage(LAYOUT, torch.device("cuda")), id="disk of cuda", marks=gpu),
]


def random_pages(count, generator=None):
    pages = {}
    for name, (shape, dtype) in LAYOUT.items():
        numbers = torch.randint(-100, 100, (count, *shape), generator=generator)
        pages[name] = numbers.to(dtype)
    return pages


def open_files(folder) -> list[int]:
    """Sizes of the files, named or not, that this process has open in `folder`."""
    sizes = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(descriptor).startswith(f"{folder}/"):
                sizes[os.stat(descriptor).st_ino] = os.stat(descriptor).st_size
        except OSError:  # closed meanwhile
            continue
    return list(sizes.values())


@pytest.mark.parametrize("build", STORAGES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_same_pages_whatever_is_written_resized_and_prefetched(build, data):
    plain, storage = Resident().storage(LAYOUT, torch.device("cpu")), build()
    generator, written = torch.Generator().manual_seed(0), set()
    for action in data.draw(st.lists(st.sampled_from(["grow", "write", "write", "prefetch", "view"]), max_size=15)):
        if action == "grow":
            capacity = plain.capacity + data.draw(st.integers(-1, 6))
            plain.resize(capacity)
            with poisoned():
                storage.resize(capacity)
        elif action == "write" and plain.capacity:
            numbers = data.draw(st.lists(st.integers(0, plain.capacity - 1), max_size=5, unique=True))
            pages, ids = random_pages(len(numbers), generator), torch.tensor(numbers, dtype=torch.int64)
            plain.write(ids, pages)
            storage.write(ids, {name: part.to(storage.device) for name, part in pages.items()})
            written.update(numbers)
        elif action == "prefetch":
            storage.prefetch()
        elif action == "view":
            compare(plain, storage, written)
    compare(plain, storage, written)


def compare(plain, storage, written):
    ids = torch.tensor(sorted(written), dtype=torch.int64)
    found, expected = storage.view(), plain.view()
    assert storage.capacity == plain.capacity
    for name, (shape, dtype) in LAYOUT.items():
        assert found[name].shape == (plain.capacity, *shape)
        assert found[name].dtype == dtype
        assert found[name].device.type == storage.device.type
        assert torch.equal(found[name].cpu()[ids].float(), expected[name][ids].float())


@pytest.mark.parametrize("build", STORAGES)
def test_a_write_after_a_prefetch_is_seen(build):
    storage = build()
    storage.resize(4)
    storage.write(torch.arange(4), random_pages(4))
    for _ in range(20):
        storage.prefetch()
        pages = random_pages(2)
        storage.write(torch.tensor([3, 1]), pages)
        assert torch.equal(storage.view()["keys.data"][[3, 1]].cpu(), pages["keys.data"])


@pytest.mark.parametrize("build", STORAGES)
def test_bytes_are_those_of_the_files_and_tensors(build):
    storage = build()
    assert sum(storage.bytes_by_tier().values()) == 0
    storage.resize(7)
    size = 7 * sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in LAYOUT.values())
    home = "disk" if isinstance(storage, DiskStorage) else "cpu"
    held = storage.bytes_by_tier()[home]
    assert size <= held <= size + (7 * 16 * len(LAYOUT) if home == "disk" else 0)  # in files, parts are aligned
    storage.prefetch()
    away = "cpu" if home == "disk" else str(storage.device)
    if storage.device.type != home:
        assert storage.bytes_by_tier() == {home: held, away: size}
    storage.view()
    assert storage.bytes_by_tier() == {home: held}


# --- files --------------------------------------------------------------------------------------------------------


def disk_cache(model, folder, name="offloaded_paged_int8"):
    return make_cache(name, model, page_size=8, offload_to="disk", offload_folder=str(folder))


def run(model, cache, tokens=50, new=20, **kwargs):
    ids = torch.randint(3, 128, (2, tokens))
    options = {forward_cache_name(model): cache, "max_new_tokens": new, "do_sample": False, **kwargs}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def test_the_disk_tier_is_the_size_of_its_files(llama, tmp_path):
    cache = disk_cache(llama, tmp_path)
    run(llama, cache)
    tiers = cache.stats().bytes_by_tier
    assert tiers["disk"] == sum(open_files(tmp_path)) > 0
    # 2 rows x 2 heads of 8 pages in 2 layers, each 8 keys and values of 16 int8 codes and a float16 scale
    assert tiers["disk"] <= 17 / 16 * 2 * (2 * 2 * 8) * 2 * 8 * (16 + 2) + 2 * 2 * 2 * 8 * 18


@pytest.mark.parametrize("end", ["deleted", "reset", "exception"])
def test_files_vanish_with_the_cache(llama, tmp_path, end):
    cache = disk_cache(llama, tmp_path)

    def fail(ids, scores):
        if ids.shape[1] > 60:
            assert open_files(tmp_path)
            raise RuntimeError("in the middle")
        return scores

    if end == "exception":
        with pytest.raises(RuntimeError, match="in the middle"):
            run(llama, cache, logits_processor=[fail])
    else:
        run(llama, cache)
    assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path)
    if end == "reset":
        cache.reset()
    else:
        del cache
        gc.collect()
    assert open_files(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_files_vanish_with_a_process_that_is_killed(tmp_path):
    code = """
import sys, torch
from hf_kvplus.formats import FORMATS
from hf_kvplus.layer import PagedLayer
from hf_kvplus.placement import Offloaded
layer = PagedLayer(FORMATS["int8"], Offloaded("disk", sys.argv[1]))
layer.update(*torch.randn(2, 1, 2, 300, 16))
layer.commit()
print(layer.bytes_by_tier()["disk"], flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=pipe, stdout=pipe, text=True)
    assert int(child.stdout.readline()) == 2 * 4 * 64 * 2 * (16 + 2)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdin.close()
    child.stdout.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["missing", "file", "/proc"])
def test_a_folder_that_cannot_be_used_is_refused_at_once(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheConfigError, match=r"`offload_folder`: got '.*', accepted: an existing folder that can be"):
        OffloadedPagedCache(offload_to="disk", offload_folder=tmp_path / folder)


def test_a_read_only_folder_is_refused_at_once(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(CacheConfigError, match=r"`offload_folder`: got '.*', accepted: .*Read-only file system"):
        OffloadedPagedCache(offload_to="disk", offload_folder=tmp_path)


def test_a_folder_without_files_to_put_there_is_refused(tmp_path):
    with pytest.raises(CacheConfigError, match=r"`offload_folder`.*only `offload_to='disk'` writes files"):
        OffloadedPagedCache(offload_folder=tmp_path)


def test_a_full_disk_is_told_when_the_prompt_is_stored(llama, tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device.*`offload_folder`.*bytes of pages") as failure:
        run(llama, disk_cache(llama, tmp_path), new=1)
    assert failure.value.errno == errno.ENOSPC
    assert failure.value.filename == str(tmp_path)


# --- what moves, and when -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["native", "int8", "int4"])
def test_encoded_pages_move_and_nothing_else(format, monkeypatch):
    moved, load = [], DiskStorage._load

    def watched(parts):
        moved.append({name: (part.dtype, part.nbytes) for name, part in parts.items()})
        return load(parts)

    monkeypatch.setattr(DiskStorage, "_load", staticmethod(watched))
    layer = layer_of(
        format, page_size=16, placement=Offloaded("disk"), **({"native_pages": 0} if format == "int4" else {})
    )
    give(layer, 100, dim=16)
    (pages,) = layer.sealed.segments
    layer.prefetch()
    layer.sealed.view()
    (parts,) = moved
    layout = {f"{kind}.{name}": spec for kind, f in pages.formats.items() for name, spec in f.parts.items()}
    assert {name: dtype for name, (dtype, _) in parts.items()} == {name: dtype for name, (_, dtype) in layout.items()}
    assert sum(size for _, size in parts.values()) == pages.pool.capacity * pages.bytes_per_page


def test_the_next_layer_is_fetched_while_one_computes(llama, monkeypatch):
    cache, attention = make_cache("offloaded_paged_int8", llama, page_size=8, offload_to="disk"), []
    original = hf_kvplus.attention.decode_attention

    def watched(*args, **kwargs):
        attention.append([layer.sealed.segments[0].storage._visiting for layer in cache.layers])
        return original(*args, **kwargs)

    fetched, submit = [], DiskStorage.prefetch

    def counted(storage):
        started = storage._visiting is None
        submit(storage)
        if started:
            fetched.append(storage._visiting)

    monkeypatch.setattr(hf_kvplus.attention, "decode_attention", watched)
    monkeypatch.setattr(DiskStorage, "prefetch", counted)
    run(llama, cache, tokens=50, new=4)  # the tails of 50 to 53 tokens fill no page
    assert len(attention) == 3 * 2
    for call, (first, second) in enumerate(attention):
        if call % 2 == 0:
            assert isinstance(second, Future), "the second layer's pages are not on their way while the first computes"
        else:
            assert isinstance(first, Future), "nor the first's, for the next step, while the second computes"
    assert len(set(map(id, fetched))) == len(fetched) <= 3 * 2 + 2, "pages were fetched more than once a step"
    wait(fetched)
    assert all(future.exception() is None for future in fetched)


@pytest.mark.parametrize("placement", ["cpu", "disk"])
@pytest.mark.parametrize("name", ["paged_native", "sliding_paged_native", "keydiff_paged_int8"])
def test_offloading_changes_no_token(llama, placement, name):
    options = {"page_size": 8, **({"window": 30} if "sliding" in name else {"budget": 30} if "keydiff" in name else {})}
    modes = [{"do_sample": False}, {"num_beams": 3}]
    for mode in modes:
        torch.manual_seed(0)
        plain = run(llama, make_cache(name, llama, **options), new=40, **mode)
        torch.manual_seed(0)
        moved = run(llama, make_cache(f"offloaded_{name}", llama, offload_to=placement, **options), new=40, **mode)
        assert torch.equal(plain, moved)


# --- CUDA ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_visits_to_the_device_take_the_memory_of_two_layers_however_far_the_host_runs_ahead():
    layout, device = {"data": ((1 << 20,), torch.uint8)}, torch.device("cuda")
    storages = [HostStorage(layout, device) for _ in range(16)]
    for index, storage in enumerate(storages):
        storage.resize(16)
        storage.write(torch.arange(16), {"data": torch.full((16, 1 << 20), index, dtype=torch.uint8, device=device)})
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, sums = torch.cuda.memory_allocated(), []
    for index, storage in enumerate(storages):
        storages[(index + 1) % 16].prefetch()
        torch.cuda._sleep(20_000_000)
        sums.append(storage.view()["data"].sum(dtype=torch.int64))
    assert [int(total) >> 24 for total in sums] == list(range(16))
    assert torch.cuda.max_memory_reserved() - before <= 4 * 16 << 20
