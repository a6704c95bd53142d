"""Tables and the plot of what `quality.py` found."""

import json
from pathlib import Path

from rich.table import Table


def newest(path: Path) -> list[dict]:
    """The results of the last run in the file."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["time"] == lines[-1]["time"]]


_COLUMNS = {
    "cache": lambda r: r["cache"],
    "bits": lambda r: "" if r["bits"] is None else f"{r['bits']:.3g}",
    "KL": lambda r: f"{r['kl']:.5f}",
    "ΔNLL": lambda r: f"{r['delta_nll']:+.4f}",
    "top-1": lambda r: f"{r['top1']:.1%}",
    "bytes per token": lambda r: f"{r['bytes_per_token']:,.0f}",
    "compression": lambda r: f"{r['compression']:.2f}x",
    "encode, ms per 1,000 tokens": lambda r: f"{r['encode_ms_per_1000_tokens']:.0f}",
    "decode, ms per 1,000 tokens": lambda r: f"{r['decode_ms_per_1000_tokens']:.0f}",
}


def table(results: list[dict]) -> Table:
    shown = Table(*_COLUMNS)
    for result in results:
        shown.add_row(*(column(result) for column in _COLUMNS.values()))
    return shown


def markdown(results: list[dict]) -> str:
    rows = [list(_COLUMNS), ["---"] * len(_COLUMNS)]
    rows += [[column(result) for column in _COLUMNS.values()] for result in results]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def plot(results: list[dict], path: Path) -> None:
    """KL against the bits that a number really takes: bytes held after the prompt, over the numbers in it."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for ours, marker, label in ((True, "o", "hf_kvplus"), (False, "s", "transformers' QuantizedCache")):
        points = [r for r in results if r["cache"].startswith("paged_") == ours]
        axes.plot([32 / r["compression"] for r in points], [r["kl"] for r in points], marker, label=label)
        for r in points:
            name = r["cache"].removeprefix("paged_").removeprefix("transformers ")
            axes.annotate(name, (32 / r["compression"], r["kl"]), xytext=(5, 4), textcoords="offset points", fontsize=7)
    axes.set(yscale="log", xlabel="bits per cached number, everything counted", ylabel="mean KL divergence")
    axes.set_title(f"{results[0]['model']}, {results[0]['prompt']:,} tokens of prompt")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
