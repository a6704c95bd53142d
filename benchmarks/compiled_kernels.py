"""What the compiler makes of the Triton kernels, for GPUs that need not be there: registers, spills, loads, occupancy.

    python benchmarks/compiled_kernels.py   # writes benchmarks/results/kernels.jsonl and prints the table

Needs triton (its wheel carries ptxas and cuobjdump) and no GPU. It says nothing about time.
"""

import json
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_kvplus.formats import FORMATS
from hf_kvplus.ops._triton_codes import Launch
from hf_kvplus.ops.decode_attention import PageView
from hf_kvplus.ops.decode_attention.triton import flattened
from hf_kvplus.ops.decode_attention.triton_launch import plan
from hf_kvplus.ops.gather_pages import triton_kernels as gathering
from hf_kvplus.ops.seal_pages import triton_kernels as sealing
from hf_kvplus.ops.seal_pages.triton import described

FORMAT_NAMES = ("native", "int8", "fp8", "int4", "k4v2", "int2")
#: Per compute capability: bytes of shared memory of a multiprocessor, and the most for one program; most warps and
#: programs (NVIDIA's CUDA programming guide, "Technical specifications per compute capability"). 64 Ki registers each.
DEVICES = {
    80: {"shared": 164 << 10, "shared_program": 163 << 10, "warps": 64, "programs": 32},
    90: {"shared": 228 << 10, "shared_program": 227 << 10, "warps": 64, "programs": 32},
    100: {"shared": 228 << 10, "shared_program": 227 << 10, "warps": 64, "programs": 32},
}
_BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
_POINTERS = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int16: "i16",
    torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip


def launches(
    name, dtype=torch.bfloat16, dim=128, value_dim=None, page=64, group=4, tokens=1, masked=False, softcap=None
):
    """The launches of one decode step over 4,096 tokens in format `name`, with a tail and what native pages it has."""
    rows, kv_heads, value_dim, spec = 2, 8, value_dim or dim, FORMATS[name]

    def view(spec, columns):
        formats = (
            spec.key(page, dim, dtype, channel_major=True),
            spec.value(page, value_dim, dtype, channel_major=False),
        )
        parts = [{n: torch.empty((1, *shape), dtype=d) for n, (shape, d) in f.parts.items()} for f in formats]
        return PageView(*parts, *formats, torch.zeros((rows, kv_heads, columns), dtype=torch.int32))

    views = [view(FORMATS["native"], spec.native_pages)] if spec.native_pages else []
    views.append(view(spec, 4096 // page))
    query = torch.empty(rows, kv_heads * group, tokens, dim, dtype=dtype)
    tail = [torch.empty(rows, kv_heads, 32, width, dtype=dtype) for width in (dim, value_dim)]
    slots = sum(view.tokens for view in views) + 32
    mask = torch.empty((rows, 1, tokens, slots), dtype=torch.bool) if masked else None
    args = (query, *flattened(views), *tail, mask, dim**-0.5, softcap, None)
    return plan(*args, compiled=True)[1]


def page_launch(op: str, name: str, keys: bool, dtype=torch.bfloat16, dim=128, page=64) -> Launch:
    """The launch that seals (`"seal"`) or reads (`"gather"`) 16 pages of keys or values in format `name`."""
    spec = FORMATS[name]
    format = (spec.key if keys else spec.value)(page, dim, dtype, channel_major=keys)
    parts = [torch.empty((32, *shape), dtype=d) for shape, d in format.parts.values()]
    if op == "seal":
        tokens = torch.empty((16, page + 15, dim), dtype=dtype)[:, :page]
        (launch,) = sealing.plan(tokens, torch.arange(16), parts, *described(format), compiled=True)
        return launch
    kind, channel_major, rotation, group, _ = described(format)
    table = torch.zeros((2, 8, 1), dtype=torch.int32)
    _, (launch,) = gathering.plan(
        parts, table, kind, channel_major, page, dim, rotation, group, dtype, compiled=True
    )  # fmt: skip
    return launch


def compile_for(launch: Launch, capability: int):
    """The compiled kernel of `launch` for a GPU of `capability`, as the just-in-time compiler would specialise it."""
    fn, signature, constants, attributes = launch.kernel, {}, {}, {}
    for i, parameter in enumerate(fn.params):
        value = launch.args[parameter.name]
        fixed = parameter.is_constexpr or value is None
        if fixed or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(i,)] = "*" + _POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={**launch.options, "enable_fp_fusion": True}
    )


def inspect(compiled, capability: int) -> dict:
    """Registers, shared memory, spills, instructions and occupancy of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        sass = _cuobjdump("--dump-sass", file.name)
    registers, stack, _, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage).groups())
    code = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)]
    names = Counter(_name(text) for _, text in code)
    device, warps = DEVICES[capability], compiled.metadata.num_warps
    shared = compiled.metadata.shared
    programs = min(
        device["programs"],
        device["warps"] // warps,
        (64 << 10) // (-(-registers // 8) * 8 * 32 * warps),
        device["shared"] // (shared + 1024),
    )
    count = lambda *patterns: sum(n for name, n in names.items() if all(re.search(p, name) for p in patterns))  # noqa: E731
    return {
        "capability": capability,
        "registers": registers,
        "spilled_bytes": stack + local,
        "local_accesses": count(r"^(LDL|STL)"),
        "shared_bytes": shared,
        "warps": warps,
        "programs_per_multiprocessor": programs,
        "occupancy": round(programs * warps / device["warps"], 3),
        "loads_128": count(r"^(LDG|LDGSTS)", "128"),
        "matrix_instructions": count(r"^(HMMA|HGMMA|UTCHMMA|DMMA)"),
        "loop_instructions": len(_main_loop(code)),
    }


def _cuobjdump(*arguments: str) -> str:
    return subprocess.run([_BIN / "cuobjdump", *arguments], capture_output=True, text=True, check=True).stdout


def _main_loop(code: list[tuple[int, str]]) -> list[str]:
    """The instructions of one tile: of the loop with the most asynchronous copies, else matrix instructions."""
    loops = []
    for at, text in code:
        target = re.search(r"BRA.*?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            loops.append([_name(text) for there, text in code if int(target[1], 16) <= there <= at])
    weight = lambda loop: tuple(sum(name.startswith(p) for name in loop) for p in ("LDGSTS", "HMMA"))  # noqa: E731
    return max(loops, key=weight, default=[])


def _name(text: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def report(name: str, capability: int, **shape) -> dict:
    """The figures of the kernel that reads the pages."""
    launch = next(launch for launch in launches(name, **shape) if launch.args.get("EXTRA"))
    figures = inspect(compile_for(launch, capability), capability)
    return {"op": "decode", "format": name, **_shown(shape), **figures}


def page_report(op: str, name: str, keys: bool, capability: int, **shape) -> dict:
    """The figures of the kernel that seals or reads pages of keys or values."""
    figures = inspect(compile_for(page_launch(op, name, keys, **shape), capability), capability)
    return {"op": f"{op} {'keys' if keys else 'values'}", "format": name, **_shown(shape), **figures}


def _shown(shape: dict) -> dict:
    return {"dtype": str(shape.get("dtype", torch.bfloat16)).removeprefix("torch."), "dim": shape.get("dim", 128)}


def main() -> None:
    results = Path(__file__).parent / "results" / "kernels.jsonl"
    results.parent.mkdir(exist_ok=True)
    rows = [
        report(name, capability, dim=dim)
        for capability in DEVICES
        for name in FORMAT_NAMES
        for dim in ((64, 128, 256) if capability == 90 else (128,))
    ]
    rows += [
        page_report(op, name, keys, 90)
        for op in ("seal", "gather")
        for keys in (True, False)
        for name in ("native", "int8", "fp8", "int4", "int2")
    ]
    results.write_text("".join(json.dumps({"triton": triton.__version__, **row}) + "\n" for row in rows))
    columns = [key for key in rows[0] if key not in ("dtype", "local_accesses")]
    print(*columns)
    for row in rows:
        print(*(row[key] for key in columns))


if __name__ == "__main__":
    main()
