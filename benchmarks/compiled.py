"""Decode steps that `torch.compile` has compiled, as `generate()` does it, against eager ones, in one run.

    python benchmarks/compiled.py                   # appends to benchmarks/results/compiled.jsonl
    python benchmarks/compiled.py --lengths 1000 --caches StaticCache paged_int8

The caches take turns, a few steps each, as in `generate.py`. `DynamicCache` runs eagerly (it cannot be compiled); all
others run in one graph (inductor, `fullgraph=True`). Compiling takes about a minute per cache on two cores. Needs the
extra `bench`. SmolLM2-135M-Instruct, float32.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import generate
import torch
import transformers
from generate import BASE, ROOM, console
from rich.progress import Progress
from rich.table import Table
from transformers import CompileConfig

import hf_kvplus
from hf_kvplus._compat import forward_cache_name

CACHES = ("StaticCache", "paged_native", "paged_int8", "paged_int4")


class Contender:
    """A cache, prefilled, and the steps that run on it: compiled, unless it is transformers' DynamicCache."""

    def __init__(self, name: str, model, ids: torch.Tensor) -> None:
        self.model, self.ids = model, ids
        self.cache = generate.build(name, model, ids.shape[1])
        if isinstance(self.cache, hf_kvplus.PagedCache):
            self.cache.reserve(ids.shape[1] + ROOM)
        generate.fill(model, self.cache, ids, ids.shape[1] if name == "StaticCache" else 1024)
        config = CompileConfig(fullgraph=True, mode="default")
        self.forward = model if name == BASE else model.get_compiled_call(config)
        self.seen = ids.shape[1]

    @torch.inference_mode()
    def step(self) -> float:
        """Decode one token as `generate` would; seconds, the preparation of its inputs included."""
        start = time.perf_counter()
        inputs = self.model.prepare_inputs_for_generation(
            self.ids[:, :1],
            next_sequence_length=1,
            attention_mask=None,
            position_ids=torch.tensor([[self.seen]]),
            use_cache=True,
            **{forward_cache_name(self.model): self.cache},
        )
        self.forward(**inputs, return_dict=True)
        self.seen += 1
        return time.perf_counter() - start


def measure(model, length: int, names: list[str], turns: int, steps: int, progress: Progress) -> None:
    ids, contenders = generate.tokens(length), {}
    for name in progress.track([BASE, *names], description=f"compiling at {length:,} tokens"):
        contenders[name] = Contender(name, model, ids)
        for _ in range(3):  # the first steps pay for compiling
            contenders[name].step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in progress.track(range(turns), description="decoding"):
        for name, contender in contenders.items():
            contender.step()  # guards of the others were asked last
            times[name].append(statistics.median(contender.step() for _ in range(steps)))
    for name, own in times.items():
        generate.record(
            "compiled",
            cache=name,
            tokens=length,
            rows=1,
            ms_per_token=1000 * statistics.median(own),
            ratio_to_dynamic=statistics.median(a / b for a, b in zip(own, times[BASE])),
            ratio_to_static=statistics.median(a / b for a, b in zip(own, times["StaticCache"])),
        )


def table() -> None:
    shown = Table(title="decode steps, compiled (DynamicCache: eager)")
    for column in ("cache", "tokens", "ms per token", "to DynamicCache", "to StaticCache", "load"):
        shown.add_column(column, justify="left" if column == "cache" else "right")
    for row in sorted(generate.rows_of("compiled"), key=lambda row: row["tokens"]):
        figures = (f"{row[name]:.2f}" for name in ("ratio_to_dynamic", "ratio_to_static"))
        shown.add_row(row["cache"], f"{row['tokens']:,}", f"{row['ms_per_token']:.1f}", *figures, str(row["load"]))
    console.print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1000, 7000])
    parser.add_argument("--caches", nargs="+", default=CACHES, help="StaticCache and strings of ours")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    generate.RESULTS = Path(__file__).parent / "results" / "compiled.jsonl"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console.print(f"Load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads. An idle machine is wanted.")
    with torch.inference_mode():
        model = generate.load_model()
        with Progress(console=console, transient=True) as progress:
            for length in arguments.lengths:
                torch._dynamo.reset()
                measure(model, length, arguments.caches, arguments.turns, arguments.steps, progress)
    table()


if __name__ == "__main__":
    main()
