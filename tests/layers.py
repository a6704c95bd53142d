"""Single layers to test with."""

import torch

from hf_kvplus.formats import FORMATS
from hf_kvplus.layer import PagedLayer
from hf_kvplus.placement import Resident


def layer_of(format="native", retention=None, page_size=64, placement=None, **options) -> PagedLayer:
    return PagedLayer(FORMATS[format].with_options(**options), placement or Resident(), retention, page_size)


def give(layer, tokens, rows=1, heads=2, dim=8, dtype=torch.float32, padding=None):
    """Update and commit; returns the keys given."""
    keys, values = torch.randn(2, rows, heads, tokens, dim, dtype=dtype)
    layer.update(keys, values)
    layer.commit(padding)
    return keys
