"""Decode attention of one layer, one new token: pages against SDPA on a dense cache, as ratios within one run.

    python benchmarks/ops.py                    # the default cases; appends to benchmarks/results/ops.jsonl
    python benchmarks/ops.py --formats int8 int4 --tokens 8192 --heads 32/8 --dim 128
    python benchmarks/ops.py --device cuda --dtype bfloat16 --batch 1 8 32 --tokens 1024 8192 32768 131072

Every format is checked against the reference before it is timed. Contenders take turns, one call each per round, so
that what disturbs the machine disturbs all of them; a figure is the median over the rounds, a ratio that of the ratios.
What is timed:

- `sdpa`: `scaled_dot_product_attention` alone, on keys and values that lie ready in the model's dtype;
- `dynamic`: what transformers' DynamicCache adds to that, a `cat` of the whole cache with the new token;
- a format: `decode_attention` over the pages and the tail; with `+update`, the layer's append as well.

A busy machine makes the figures worthless: results are kept only if it was idle at the start (or with `--keep`).
"""

import argparse
import datetime
import json
import os
import platform
import random
import time
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from hf_kvplus.formats import FORMATS
from hf_kvplus.layer import PagedLayer
from hf_kvplus.ops.decode_attention import decode_attention
from hf_kvplus.placement import Resident

RESULTS = Path(__file__).parent / "results" / "ops.jsonl"
#: Query heads, KV heads, channels, tokens: a Llama-3-8B layer, then one of SmolLM2-135M.
CASES = [("32/8", 128, 8192), ("32/8", 128, 32768), ("9/3", 64, 4096), ("9/3", 64, 8192)]
ALLOWED_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["native", "int8", "int4", "k4v2", "int2", "fp8"])
    parser.add_argument("--heads", nargs="+", help="query heads / KV heads, such as 32/8 (with --dim and --tokens)")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--backend", default="auto", help="of decode_attention")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--keep", action="store_true", help="append the results even if the machine was busy")
    return parser.parse_args()


def filled_layer(format: str, keys: torch.Tensor, values: torch.Tensor, page_size: int) -> PagedLayer:
    """A layer that holds the tokens given, with half a page of them in the tail."""
    layer, cut = PagedLayer(FORMATS[format], Resident(), page_size=page_size), page_size // 2
    for run in (slice(None, -cut), *(slice(i, i + 1) for i in range(keys.shape[2] - cut, keys.shape[2]))):
        layer.update(keys[:, :, run], values[:, :, run])
        layer.commit()
    return layer


def contenders(args, query, keys, values) -> dict:
    """What is timed, by name: a function to call, and the bytes that it has to read."""
    new = [x[:, :, -1:].contiguous() for x in (keys, values)]
    rows, heads, _, dim = query.shape
    kv_heads, scale = keys.shape[1], dim**-0.5
    grouped = query.view(rows, kv_heads, heads // kv_heads, dim)  # faster than `enable_gqa`, and the same

    def sdpa():
        return scaled_dot_product_attention(grouped, keys, values)

    def dynamic():
        joined = (torch.cat(pair, dim=-2) for pair in zip((keys, values), new))
        return scaled_dot_product_attention(grouped, *joined)

    dense = keys.nbytes + values.nbytes
    found = {"sdpa": (sdpa, dense), "dynamic": (dynamic, dense)}
    for format in args.formats:
        layer = filled_layer(format, keys, values, args.page_size)

        def attend(layer=layer, backend=args.backend):
            return decode_attention(query, layer.sealed.view(), *layer.unsealed(), scale=scale, backend=backend)

        def step(layer=layer, attend=attend):
            layer.update(*new)
            out = attend()
            layer.crop(-1)
            return out

        exact, error = attend(backend="torch").float(), attend().float()
        error = float((error - exact).square().mean().sqrt() / exact.square().mean().sqrt())
        if not error <= ALLOWED_ERROR[query.dtype]:
            raise SystemExit(f"{format} differs from the reference by {error:.2g} (relative RMS): nothing is timed.")
        bytes_read = sum(layer.bytes_by_tier().values())
        found[format], found[f"{format}+update"] = (attend, bytes_read), (step, bytes_read)
    return found


def seconds(call, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(args, batch: int, heads: str, dim: int, tokens: int, tick) -> list[dict]:
    """One line per contender."""
    query_heads, kv_heads = map(int, heads.split("/"))
    like = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    query = torch.randn(batch, query_heads, 1, dim, **like)
    keys, values = (torch.randn(batch, kv_heads, tokens, dim, **like) for _ in range(2))
    found = contenders(args, query, keys, values)
    times = {name: [] for name in found}
    order = list(found)
    for turn in range(args.rounds + 2):
        random.Random(turn).shuffle(order)
        for name in order:
            taken = seconds(found[name][0], args.device)
            if turn >= 2:  # the first rounds warm up
                times[name].append(taken)
        tick()
    return [
        {
            "batch": batch, "heads": query_heads, "kv_heads": kv_heads, "dim": dim, "tokens": tokens, "what": name,
            "ms": median(times[name]) * 1e3,
            "of_sdpa": median(a / b for a, b in zip(times[name], times["sdpa"])),
            "of_dynamic": median(a / b for a, b in zip(times[name], times["dynamic"])),
            "gb_per_s": found[name][1] / median(times[name]) / 1e9,
        }
        for name in found
    ]  # fmt: skip


def copy_bandwidth(device: str) -> float:
    """GB/s of a large copy, read and written bytes together: what the machine can move."""
    source = torch.zeros(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(seconds(lambda: target.copy_(source), device) for _ in range(9)) / 1e9


@torch.inference_mode()
def main() -> None:
    args, console = arguments(), Console()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    cases = [(h, args.dim, n) for h in args.heads for n in args.tokens] if args.heads else CASES
    load = os.getloadavg()[0]
    idle = load < 0.3 * os.cpu_count()
    if not idle:
        console.print(f"[yellow]The load average is {load:.1f}: something else is running, these figures are not good.")
    lines = []
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=len(args.batch) * len(cases) * (args.rounds + 2))
        for batch in args.batch:
            for case in cases:
                progress.update(task, description="{} heads, {} channels, {} tokens".format(*case))
                lines += measure(args, batch, *case, tick=lambda: progress.advance(task))

    run = {
        "time": datetime.datetime.now().isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name()
        if args.device != "cpu"
        else f"{platform.machine()}, {os.cpu_count()} CPUs",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
        "page_size": args.page_size,
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "copy_gb_per_s": round(copy_bandwidth(args.device), 1),
    }
    table = Table(
        *"batch heads dim tokens what ms ×sdpa ×dynamic GB/s".split(), title=" · ".join(map(str, run.values()))
    )
    for line in lines:
        shape = [str(line[key]) for key in ("batch", "heads", "dim", "tokens", "what")]
        shape[1] += f"/{line['kv_heads']}"
        figures = [
            f"{line['ms']:.3f}",
            f"{line['of_sdpa']:.3f}",
            f"{line['of_dynamic']:.3f}",
            f"{line['gb_per_s']:.1f}",
        ]
        table.add_row(*shape, *figures, end_section=line["what"] == lines[-1]["what"])
    console.print(table)
    if not (idle or args.keep):
        console.print("Not kept: the machine was busy. `--keep` keeps them all the same.")
        return
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        for line in lines:
            figures = {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}
            file.write(json.dumps({**run, **figures}) + "\n")
    console.print(f"Appended to {RESULTS}.")


if __name__ == "__main__":
    main()
