"""All that wants a GPU, as one script: the kernels' tests, then decode attention, then tokens per second of models.

    python benchmarks/gpu.py                        # fits in 12 minutes; appends to benchmarks/results/gpu.jsonl
    python benchmarks/gpu.py --parts decode --models 1B --tokens 8192 --minutes 30
    python benchmarks/gpu.py --dry-run              # every line on the CPU, with tiny shapes; writes nothing

Nothing is timed unless the tests pass (or `--parts` leaves them out). Each part has a share of the minutes; what does
not fit is recorded as skipped, and can be run later by itself. Parts:

- `tests`: `pytest -m gpu tests/gpu`;
- `ops`: the cases of `ops.py`, formats against `scaled_dot_product_attention` on a dense cache, with the share of the
  bandwidth that a large copy reaches on the device;
- `decode`: random Llamas in the shape of Llama 3.2 1B and Llama 3.1 8B. Caches are filled with random keys and values,
  then steps are run, compiled as `generate()` compiles them (`--capture graph`: captured in a CUDA graph as they are,
  which takes seconds instead of a minute for each cache).

Needs the extras `test` and `bench`.
"""

import argparse
import datetime
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["HF_KVPLUS_TRITON"] = "1"

import ops
import torch
import transformers
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, StaticCache

import hf_kvplus
from hf_kvplus._compat import forward_cache_name

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu.jsonl"
FORMATS = ["native", "int8", "int4", "k4v2", "int2", "fp8"]
CACHES = ["StaticCache", "paged_native", "paged_int8", "paged_int4"]
MODELS = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 128},
}
#: How the minutes are shared out among the parts that run. A case under way is finished: hence one that nobody has.
SHARES = {"tests": 4, "ops": 3, "decode": 4}
SPARE = 1
WARMUP, STEPS = 5, 50


class Budget:
    """The time that a part has left."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", default=list(SHARES), choices=SHARES)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--models", nargs="+", default=["8B", "1B"], choices=MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[32768, 8192, 131072, 1024], help="most wanted first")
    parser.add_argument("--op-batch", nargs="+", type=int, default=[8, 1, 32])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--capture", default="compile", choices=["compile", "graph"])
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    args.device, args.dtype = "cuda", torch.bfloat16
    if args.dry_run:
        args.device, args.dtype, args.models = "cpu", torch.float32, ["tiny"]
        args.tokens, args.batch, args.op_batch = [200, 130], [1, 2], [1, 2]
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device (`--dry-run` runs on the CPU)")
    return args


def record(args, part: str, **found) -> None:
    """A line of the results: printed, and appended unless this is a dry run."""
    row = {
        "part": part,
        **{key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()},
        "device": args.device if args.dry_run else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_kvplus": hf_kvplus.__version__,
        "time": datetime.datetime.now().isoformat(timespec="seconds"),
    }
    print(json.dumps(row), flush=True)
    if not args.dry_run:
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


def run_tests(args, budget: Budget) -> bool:
    """Whether the tests that need a GPU pass (in a dry run: are collected)."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    if not args.dry_run:  # compiling takes most of the time, and several processes compile at once
        command += ["-n", str(min(8, os.cpu_count())), "--maxfail", "20"]
    try:
        run = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=budget.left)
        code, output = run.returncode, run.stdout
    except subprocess.TimeoutExpired as expired:
        code, output = "out of time", (expired.stdout or b"").decode()
    if code != 0:
        print(output[-20000:])
    record(args, "tests", code=code, summary=output.strip().splitlines()[-1] if output.strip() else "")
    return code == 0


def run_ops(args, budget: Budget) -> None:
    copy = ops.copy_bandwidth(args.device)
    wanted = SimpleNamespace(formats=FORMATS, page_size=64, device=args.device, rounds=2 if args.dry_run else 15)
    wanted.dtype, wanted.backend = str(args.dtype).removeprefix("torch."), "torch" if args.dry_run else "triton"
    for tokens, batch in itertools.product(args.tokens, args.op_batch):
        case = {"heads": 32, "kv_heads": 8, "dim": 128, "tokens": tokens, "batch": batch, "dtype": wanted.dtype}
        if not budget.left:
            record(args, "ops", **case, skipped="out of time")
            continue
        try:
            for line in ops.measure(wanted, batch, "32/8", 128, tokens, tick=lambda: None):
                share = line["gb_per_s"] / copy
                record(args, "ops", **{**case, **line}, copy_gb_per_s=copy, share_of_copy=share)
        except (torch.OutOfMemoryError, SystemExit) as error:
            record(args, "ops", **case, skipped=str(error).splitlines()[0])
        free(args)


def run_decode(args, budget: Budget) -> None:
    for name in args.models:
        model = None
        for tokens, batch, cache in itertools.product(args.tokens, args.batch, CACHES):
            case = {"model": name, "tokens": tokens, "batch": batch, "cache": cache, "capture": args.capture}
            if not budget.left:
                record(args, "decode", **case, skipped="out of time")
                continue
            try:
                model = model or random_llama(args, name)
                record(args, "decode", **case, **measure_decode(args, model, cache, tokens, batch))
            except torch.OutOfMemoryError as error:
                record(args, "decode", **case, skipped=str(error).splitlines()[0])
            torch._dynamo.reset()
            free(args)
        del model
        free(args)


def random_llama(args, name: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        **{"num_attention_heads": 4 if name == "tiny" else 32, "num_key_value_heads": 2 if name == "tiny" else 8},
        **{"vocab_size": 128256, "max_position_embeddings": 2**18, "tie_word_embeddings": name == "1B", **MODELS[name]},
        dtype=args.dtype,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(args.dtype)
    try:
        with torch.device(args.device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def filled(args, model, name: str, tokens: int, batch: int):
    """A cache of that many random tokens, with room for the steps to come."""
    config, room = model.config, tokens + WARMUP + STEPS + 1
    if name == "StaticCache":
        cache = StaticCache(config=config, max_cache_len=room)
    else:
        cache = hf_kvplus.make_cache(name, model)
        cache.reserve(room)
    keys, values = (
        torch.randn(batch, config.num_key_value_heads, tokens, config.head_dim, device=args.device, dtype=args.dtype)
        for _ in range(2)
    )
    for index, layer in enumerate(cache.layers):
        cache.update(keys, values, index)
        if name != "StaticCache":
            layer.commit()
            layer.resume()
    return cache


def measure_decode(args, model, name: str, tokens: int, batch: int) -> dict:
    """Tokens per second, and bytes at the peak: while the steps ran, and what the cache alone holds of them."""
    before = allocated(args)
    cache = filled(args, model, name, tokens, batch)
    free(args)
    held = allocated(args) - before
    token = torch.ones((batch, 1), dtype=torch.int64, device=args.device)
    position = torch.full((batch, 1), tokens, device=args.device)
    forward, started = capture(args, model, cache, token, position), time.perf_counter()
    for _ in range(WARMUP):
        forward()
    synchronize(args)
    compiled = time.perf_counter() - started
    if not args.dry_run:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(STEPS):
        forward()
    synchronize(args)
    seconds = (time.perf_counter() - started) / STEPS
    peak = 0 if args.dry_run else torch.cuda.max_memory_allocated()
    return {
        "tokens_per_s": batch / seconds,
        "ms_per_step": 1e3 * seconds,
        "cache_bytes": held,
        "peak_bytes": peak,
        "compile_s": compiled,
    }


def capture(args, model, cache, token, position):
    """A function that runs one decode step, and moves on by a token."""
    key = forward_cache_name(model)

    def inputs() -> dict:
        return model.prepare_inputs_for_generation(
            token, next_sequence_length=1, attention_mask=None, position_ids=position, use_cache=True, **{key: cache}
        )

    if args.capture == "compile":
        config = CompileConfig(fullgraph=True, mode="reduce-overhead")
        if args.dry_run:
            config = CompileConfig(fullgraph=True, backend="eager", mode=None)
        compiled = model.get_compiled_call(config)

        def step() -> None:
            compiled(**inputs(), return_dict=True)
            position.add_(1)

        return step

    def once() -> None:
        model(**inputs(), return_dict=True)
        position.add_(1)

    once()  # what is built on first use
    if args.dry_run:
        return once
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return graph.replay


def allocated(args) -> int:
    return 0 if args.dry_run else torch.cuda.memory_allocated()


def synchronize(args) -> None:
    if not args.dry_run:
        torch.cuda.synchronize()


def free(args) -> None:
    gc.collect()
    if not args.dry_run:
        torch.cuda.empty_cache()


@torch.inference_mode()
def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    for part in args.parts:
        budget = Budget(60 * args.minutes * SHARES[part] / (SPARE + sum(SHARES[other] for other in args.parts)))
        if part == "tests" and not run_tests(args, budget):
            sys.exit("The tests that need a GPU do not pass: nothing is timed.")
        if part == "ops":
            run_ops(args, budget)
        if part == "decode":
            run_decode(args, budget)


if __name__ == "__main__":
    main()
