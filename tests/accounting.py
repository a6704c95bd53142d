"""Bytes counted by walking every object that a cache reaches, knowing nothing of how the cache counts them."""

import io
import os
from collections import Counter
from concurrent.futures import Future, wait
from types import FunctionType, MethodType, ModuleType

import torch
from transformers import PreTrainedConfig

from hf_kvplus.placement.offloaded import DiskStorage

_LEAVES = (str, bytes, int, float, type, FunctionType, MethodType, ModuleType, PreTrainedConfig)


def held_bytes(owner) -> dict[str, int]:
    """Bytes of every tensor and file reachable from `owner`, by tier; what is reached twice counts once."""
    tiers, seen, todo = Counter(), set(), [owner]
    while todo:
        item = todo.pop()
        key = item.untyped_storage().data_ptr() if isinstance(item, torch.Tensor) else id(item)
        if key in seen or isinstance(item, _LEAVES):
            continue
        seen.add(key)
        if isinstance(item, torch.Tensor):
            tiers[str(item.device)] += item.untyped_storage().nbytes()
        elif isinstance(item, io.IOBase):
            tiers["disk"] += os.fstat(item.fileno()).st_size
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            todo.extend(item)
        elif isinstance(item, Future):
            wait([item])
            todo.append(item.result())
        elif hasattr(item, "__dict__"):
            mapped = {"_parts"} if isinstance(item, DiskStorage) else set()  # tensors over the files themselves
            todo.extend(value for name, value in vars(item).items() if name not in mapped)
    return {tier: size for tier, size in tiers.items() if size}
