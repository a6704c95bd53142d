"""What our own code runs under, whatever the caller runs under: no autocast, no gradients, no other thread."""

import copy
import functools
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._pytree import tree_map_only


def outside_autocast(device: torch.device) -> AbstractContextManager:
    """Within it, arithmetic on `device` has the dtypes that it says, also in the caller's `torch.autocast`."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def plain(function):
    """Run `function`, whose first tensor argument tells the device, outside of the caller's autocast."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        with outside_autocast(next(x.device for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))):
            return function(*args, **kwargs)

    return run


def storing(method):
    """Run a method that changes stored tokens: outside of autocast and gradients, and so that they can be written later
    (tensors made in `torch.inference_mode` are closed outside of it)."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        device = self.device if self.is_initialized else next((x.device for x in args if torch.is_tensor(x)), None)
        with outside_autocast(device) if device else nullcontext():
            if not torch.is_inference_mode_enabled():
                with torch.no_grad():
                    return method(self, *args, **kwargs)
            with torch.inference_mode(False), torch.no_grad():
                return method(self, *args, **kwargs)

    return run


def carries_gradient(*given) -> bool:
    """Whether what is computed now from the tensors among these arguments of a call would be trained through."""
    return torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in given)


def detached_copy(value):
    """A deep copy of `value` whose tensors, however deep in it, carry no gradient (torch copies no others)."""
    return copy.deepcopy(tree_map_only(torch.Tensor, torch.Tensor.detach, value))


@functools.cache
def tell_of_gradients() -> None:
    """Warn, once in a process, that what a cache stores is detached."""
    warnings.warn(
        "hf_kvplus: gradients stop at the cache. Keys and values are stored without their graph, so what later calls "
        "compute from them does not train them. To generate, run the model within torch.inference_mode() or "
        "torch.no_grad(); to train, give it all tokens in one call, or use transformers' DynamicCache.",
        stacklevel=2,
    )


def alone(method):
    """Run `method` while no fork of its object changes the pages that they share: forks may live in other threads."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        with self.lock:
            return method(self, *args, **kwargs)

    return run
