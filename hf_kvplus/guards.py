"""What methods run under that change stored tokens."""

import functools

import torch


def storing(method):
    """Keep what `method` stores open to later writes: tensors made in `torch.inference_mode` are closed outside it."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        if not torch.is_inference_mode_enabled():
            return method(self, *args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(self, *args, **kwargs)

    return run


def alone(method):
    """Run `method` while no fork of its object changes the pages that they share: forks may live in other threads."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        with self.lock:
            return method(self, *args, **kwargs)

    return run
