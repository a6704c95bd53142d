"""The definition of correct: index, decode, and nothing in place of a missing page."""


def gather_pages(format, parts, block_table, dtype):
    ids = block_table.flatten().long()
    if len(next(iter(parts.values()))):
        tokens = format.decode({name: part[ids.clamp(min=0)] for name, part in parts.items()}, dtype)
        # What stands where page 0 was read in place of none must go, whatever it is: 0 * NaN is NaN.
        tokens = tokens.masked_fill((ids < 0)[:, None, None], 0)
    else:
        some = next(iter(parts.values()))
        tokens = some.new_zeros((len(ids), format.page_size, format.dim), dtype=dtype or format.dtype)
    return tokens.reshape(*block_table.shape[:2], -1, format.dim)
