"""Which kernels run, with which tiles and on what grid. Imports triton: loaded when a kernel is first called."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from .._triton_codes import BITS, INTERPRETED, Launch, packing, words
from .triton_kernels import decode_splits, sum_splits
from .triton_visible import visible_units

#: A native view of at most so many tokens rides in the tail's program instead of taking programs of its own.
_RIDERS = 512
#: The fewest tokens that are worth a program.
_FEWEST = 256


@dataclass
class View:
    """Pages: their table, kinds, parts and rotations (keys', values'), and where their slots start in the mask."""

    table: torch.Tensor
    page: int
    start: int
    kinds: tuple[str, str]
    parts: tuple[list[torch.Tensor], list[torch.Tensor]]
    rotations: tuple[int, int]

    @property
    def slots(self) -> int:
        return self.table.shape[-1] * self.page


def decode_attention(*args) -> torch.Tensor:
    """The operation `hf_kvplus::decode_attention_triton`; see `triton.decode_attention`."""
    out, launches = plan(*args)
    for launch in launches:
        launch.run()
    return out


def plan(
    query, tables, parts, kinds, numbers, tail_keys, tail_values, mask, scale, softcap, sinks,
    compiled: bool = not INTERPRETED,
) -> tuple[torch.Tensor, list[Launch]]:  # fmt: skip
    """The tensor for the result, and the launches that fill it. Looks at shapes only, never at what a tensor holds."""
    rows, heads, tokens, dim = query.shape
    kv_heads, value_dim = tail_keys.shape[1], tail_values.shape[-1]
    group = heads // kv_heads
    query, tail_keys, tail_values = (_unit_stride(tensor) for tensor in (query, tail_keys, tail_values))

    views = _views(tables, parts, kinds, numbers)
    rider = views.pop(0) if len(views) > 1 and _rides(*views[:2]) else None
    if not views:  # a view that no program reads
        table = torch.empty((rows, kv_heads, 0), dtype=torch.int32, device=query.device)
        views = [View(table, 64, 0, ("float", "float"), ([tail_keys], [tail_values]), (0, 0))]
    views.sort(key=lambda view: view.rotations[1] == 0)  # the splits of rotated values come first
    masked = _mask_args(mask, kv_heads, heads, tail_keys.shape[2])
    widest = max(dim, value_dim)
    tiles = [_tile(view, query.dtype, widest, masked["MASK_ROWS"]) for view in views]
    grids = [rows * kv_heads * triton.cdiv(group * tokens, tile.rows) for tile in tiles]
    counts = [_splits(view.slots, grid, tile.resident, query.device) for view, grid, tile in zip(views, grids, tiles)]
    extra = rider is not None or tail_keys.shape[2] > 0 or not sum(counts)
    splits = sum(counts) + extra

    part = query.new_empty((rows, kv_heads, splits, group * tokens, value_dim), dtype=torch.float32)
    totals = part.new_empty((*part.shape[:-1], 2))
    out = query.new_empty((rows, tokens, heads, value_dim))

    shape = {"KV_HEADS": kv_heads, "GROUP": group, "TOKENS": tokens, "DV_": value_dim}
    shared = {
        **{"Q": query, "OUT": part, "TOTALS": totals, "TK": tail_keys, "TV": tail_values},
        **_strides("q", query, "row", "head", "token"),
        **_strides("tk", tail_keys, "row", "head", "token"),
        **_strides("tv", tail_values, "row", "head", "token"),
        **masked,
        **{"scale": scale, "softcap": softcap or 0.0, "SOFTCAP": softcap is not None},
        **{"UNITS": None, "COUNTS": None, "BITS": None, "room": 0},
        **{"length": tail_keys.shape[2], "all_splits": splits, "D_": dim, **shape},
        "COMPILED": compiled,
        **_rider_args(rider),
    }
    launches, first = [], 0
    for view, count, grid, tile in zip(views, counts, grids, tiles):
        last = extra and first + count + 1 == splits
        args = (
            shared
            | _view_args(view, query.dtype, value_dim, tile)
            | {"UNITS": None, "COUNTS": None, "BITS": None, "room": 0}
        )
        if mask is not None and count:
            launches.append(_visible(args, view, count, grid))
            args |= {name: launches[-1].args[name] for name in ("UNITS", "COUNTS", "BITS", "room")}
        args |= {"first_split": first, "splits": count, "EXTRA": last}
        launches.append(Launch(decode_splits, (grid, count + last), args, {"num_warps": tile.warps}))
        first += count

    args = {"PART": part, "TOTALS": totals, "SINKS": sinks, "OUT": out, "splits": splits, **shape}
    args["rotated"] = sum(count for view, count in zip(views, counts) if view.rotations[1])
    args["ROTATION"] = max((view.rotations[1] for view in views), default=0)
    args["STEP"] = min(triton.next_power_of_2(splits), 8192 // triton.next_power_of_2(value_dim))
    launches.append(Launch(sum_splits, (rows * heads * tokens,), args, {"num_warps": 4}))
    return out, launches


def _views(tables, parts, kinds, numbers) -> list[View]:
    """The flat arguments of the operation as views."""
    views, start = [], 0
    parts, kinds, numbers = iter(parts), iter(kinds), iter(numbers)
    for table in tables:
        names = next(kinds), next(kinds)
        (page, key_rotation, key_parts), (_, value_rotation, value_parts) = (
            [next(numbers) for _ in range(3)] for _ in range(2)
        )
        tensors = [next(parts) for _ in range(key_parts)], [next(parts) for _ in range(value_parts)]
        views.append(View(table, page, start, names, tensors, (key_rotation, value_rotation)))
        start += views[-1].slots
    return [view for view in views if view.slots]


def _rides(view: View, following: View) -> bool:
    return view.kinds == ("float", "float") and view.slots <= _RIDERS and view.page == following.page


def _splits(slots: int, programs: int, resident: int, device: torch.device) -> int:
    """Into how many parts to cut `slots` tokens, so that all programs together just fill the device."""
    return min(triton.cdiv(slots, _FEWEST), max(1, _multiprocessors(device) * resident // programs))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(name: str, tensor: torch.Tensor, *axes: str) -> dict[str, int]:
    return {f"{name}_{axis}": tensor.stride(i) for i, axis in enumerate(axes)}


def _mask_args(mask, kv_heads: int, heads: int, tail: int) -> dict[str, Any]:
    args = dict.fromkeys(("mask_row", "mask_head", "mask_group", "mask_token", "mask_tail"), 0)
    if mask is None:
        return {**args, "MASKED": None, "MASK": "none", "MASK_ROWS": False}
    mask = _unit_stride(mask)
    args["mask_tail"] = mask.shape[-1] - tail
    args["mask_row"] = mask.stride(0) if mask.shape[0] > 1 else 0
    args["mask_token"] = mask.stride(2) if mask.shape[2] > 1 else 0
    if mask.shape[1] == kv_heads:
        args["mask_head"] = mask.stride(1) if kv_heads > 1 else 0
    elif mask.shape[1] == heads:
        args["mask_head"], args["mask_group"] = heads // kv_heads * mask.stride(1), mask.stride(1)
    of_bool = mask.dtype == torch.bool
    args |= {"MASKED": mask.view(torch.uint8) if of_bool else mask, "MASK": "bool" if of_bool else "added"}
    return {**args, "MASK_ROWS": bool(args["mask_group"] or args["mask_token"])}


def _visible(shared, view: View, splits: int, programs: int) -> Launch:
    """Finds the units that the mask shows to the splits of a view."""
    units = max(view.table.shape[-1], view.slots * shared["KBITS"] // 16 // shared["WORDS"])
    room = triton.cdiv(units, splits)
    args = {name: shared[name] for name in visible_units.arg_names if name in shared}
    args |= {"splits": splits, "room": room, "AT_ONCE": 16}
    args["UNITS"] = view.table.new_empty((programs, splits, room, 2))
    args["COUNTS"] = view.table.new_empty((programs, splits))
    if shared["MASK_ROWS"] and shared["MASK"] == "bool":
        args["BITS"] = view.table.new_empty((programs, view.slots), dtype=torch.int16)
    return Launch(visible_units, (programs, splits), args, {"num_warps": 2})


def _rider_args(view: View | None) -> dict[str, Any]:
    if view is None:
        return {**dict.fromkeys(("RIDER", "RK", "RV")), "r_row": 0, "r_head": 0, "rider_columns": 0}
    args = {"RIDER": view.table, "RK": view.parts[0][0], "RV": view.parts[1][0]}
    return {**args, **_strides("r", view.table, "row", "head"), "rider_columns": view.table.shape[-1]}


def _view_args(view: View, dtype: torch.dtype, value_dim: int, tile: "_Tile") -> dict[str, Any]:
    """The arguments that say how the pages of a view are written, and in what tiles to read them."""
    key, value = view.kinds
    key_packing, value_packing = packing(key, dtype), packing(value, dtype)
    # Values have one scale per token, or one for every 32 channels: those of whole parts, or of bits of parts.
    even = value != "int2" or value_dim in (32, 64, 128)
    scales = 1 if value != "int2" else value_dim // 32 if even else 4
    return {
        **dict(zip(("KD", "KS", "KZ"), [*(words(key, part) for part in view.parts[0]), None, None])),
        **dict(zip(("VD", "VS", "VZ"), [*(words(value, part) for part in view.parts[1]), None, None])),
        **{"KEY": key, "KBITS": BITS[key], "KSTEPS": key_packing.steps, "KFACTOR": key_packing.factor},
        **{"VALUE": value, "VBITS": BITS[value], "VSTEPS": value_packing.steps, "VFACTOR": value_packing.factor},
        **{"V_SCALES": scales, "FOLD_V": even and value in ("int8", "int4", "int2")},
        **{"KROTATION": view.rotations[0], "PAGE": view.page, "WORDS": tile.tokens * BITS[key] // 16, "STAGES": 3},
        # Where pages are rounded to 8 bits or fewer, one product of 10-bit mantissas is precise enough.
        "PRECISION": "tf32x3" if view.kinds == ("float", "float") and dtype == torch.float32 else "tf32",
        **{"M": tile.rows, "TAIL": 16 * min(4, tile.warps)},
        **{"TABLE": view.table, "columns": view.table.shape[-1], "mask_pages": view.start},
        **_strides("table", view.table, "row", "head"),
    }


@dataclass(frozen=True)
class _Tile:
    """What a program works on: query rows and tokens at a time; its warps; programs per multiprocessor at a time."""

    rows: int = 16
    tokens: int = 64
    warps: int = 2
    resident: int = 4


def _tile(view: View, dtype: torch.dtype, dim: int, mask_rows: bool) -> _Tile:
    """Found by compiling (`benchmarks/compiled_kernels.py`): the fewest instructions that spill no register."""
    bits = min(BITS[kind] for kind in view.kinds)
    if dtype == torch.float32:
        return _Tile(tokens=32, warps=8, resident=1) if bits == 16 else _Tile()
    if dim > 128 and bits < 16:
        return _Tile(warps=4, resident=2)
    if bits >= 8 and mask_rows:
        return _Tile(warps=4, resident=3)
    return _Tile()
