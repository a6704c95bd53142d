"""What `quality.py` found: one row per cache and text in a file, their means as tables and as a plot."""

import json
from pathlib import Path

from rich.table import Table

_KEY = ("model", "cache", "text", "prompt", "scored", "step")
_MEANS = ("kl", "delta_nll", "top1", "bytes_per_token", "compression")


def load(path: Path) -> list[dict]:
    """All rows of a file, none if there is no such file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def merge(path: Path, rows: list[dict]) -> None:
    """Write `rows` to the file, in place of those of the same cache, text and protocol."""
    merged = {tuple(row[name] for name in _KEY): row for row in [*load(path), *rows]}
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in merged.values()), encoding="utf-8")


def means(rows: list[dict]) -> list[dict]:
    """One row per cache and length of prompt: the means over its texts, with their number as `texts`."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["prompt"], row["cache"]), []).append(row)
    return [
        {**group[0], **{name: sum(row[name] for row in group) / len(group) for name in _MEANS}, "texts": len(group)}
        for group in groups.values()
    ]


_COLUMNS = {
    "cache": lambda r: r["cache"],
    "prompt": lambda r: f"{r['prompt']:,}",
    "texts": lambda r: str(r["texts"]),
    "bits": lambda r: "" if r["bits"] is None else f"{r['bits']:.3g}",
    "KL": lambda r: f"{r['kl']:.5f}",
    "ΔNLL": lambda r: f"{r['delta_nll']:+.4f}",
    "top-1": lambda r: f"{r['top1']:.1%}",
    "bytes per token": lambda r: f"{r['bytes_per_token']:,.0f}",
    "compression": lambda r: f"{r['compression']:.2f}x",
}


def table(results: list[dict]) -> Table:
    """`results`, as `means` gives them, for a terminal."""
    shown = Table(*_COLUMNS)
    for result in results:
        shown.add_row(*(column(result) for column in _COLUMNS.values()))
    return shown


def markdown(results: list[dict]) -> str:
    """The same as a table in Markdown."""
    rows = [list(_COLUMNS), ["---"] * len(_COLUMNS)]
    rows += [[column(result) for column in _COLUMNS.values()] for result in results]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


_LIBRARIES = ("paged_nf4", "paged_fp4", "paged_quanto")
#: Series of the plot, a row being of the first that takes it: marker, and whether it does.
_SERIES = {
    "hf_kvplus, library formats": ("^", lambda r: r["cache"].startswith(_LIBRARIES)),
    "hf_kvplus, nothing native": ("D", lambda r: "all encoded" in r["cache"]),
    "transformers' QuantizedCache": ("s", lambda r: r["cache"].startswith("transformers")),
    "hf_kvplus": ("o", lambda r: True),
}


def plot(results: list[dict], path: Path) -> None:
    """KL against the bits that a number really takes: bytes held after the prompt, over the numbers in it.

    Of a cache that was run with prompts of several lengths, the longest that all texts have is drawn.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    texts = max(r["texts"] for r in results)
    results = [r for r in results if r["texts"] == texts]
    rest = {r["cache"]: r for r in sorted(results, key=lambda r: r["prompt"]) if r["kl"] > 1e-9}
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    for label, (marker, belongs) in _SERIES.items():
        points = [rest.pop(name) for name in list(rest) if belongs(rest[name])]
        axes.plot([32 / r["compression"] for r in points], [r["kl"] for r in points], marker, label=label)
        for r in points:
            name = r["cache"].removeprefix("paged_").removeprefix("transformers ").removesuffix("+all encoded")
            axes.annotate(name, (32 / r["compression"], r["kl"]), xytext=(5, 4), textcoords="offset points", fontsize=7)
    prompts = sorted({f"{r['prompt']:,}" for r in results})
    axes.set(yscale="log", xlabel="bits per cached number, everything counted", ylabel="mean KL divergence")
    axes.set_title(f"{results[0]['model']}, {texts} texts, {' or '.join(prompts)} tokens of prompt")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
