"""The definition of correct: encode, and copy by index."""

from contextlib import nullcontext

from ...formats.base import unchecked


def seal_pages(format, parts, tokens, ids):
    with nullcontext() if tokens.device.type == "cpu" else unchecked():
        encoded = format.encode(tokens)
    for name, part in parts.items():
        part[ids] = encoded[name]
