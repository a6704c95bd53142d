"""Prompts, modes of `generate()`, and what it means that two runs are the same."""

import torch
from conftest import tiny_llama
from numerics import assert_close
from torch.nn.functional import pad
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

ROUNDING = 2e-5  # relative RMS: two float32 forward passes that sum in different orders
NEW = 26  # tokens generated: with pages of 8, several seals

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "beam_sampling": {"num_beams": 3, "do_sample": True},
    "beams_returned": {"num_beams": 4, "num_return_sequences": 3},
    "beams_stop_early": {
        "num_beams": 3,
        "early_stopping": True,
        "eos_token_id": list(range(3, 30)),
        "length_penalty": 2.0,
    },
    "beams_never_stop": {
        "num_beams": 3,
        "early_stopping": "never",
        "eos_token_id": list(range(3, 9)),
        "length_penalty": -1.0,
    },
    "eos": {"do_sample": True, "eos_token_id": list(range(3, 9))},
    "returned": {"do_sample": True, "num_return_sequences": 4},
    "chunks_of_1": {"prefill_chunk_size": 1},
    "chunks_of_7": {"prefill_chunk_size": 7},
    "chunks_of_19": {"prefill_chunk_size": 19},
    "one_chunk": {"prefill_chunk_size": 500},
    "uncached": {"use_cache": False},
}


def main_model():
    """Weights large enough that a token more or less in the cache shows."""
    model = tiny_llama(initializer_range=0.2)
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return model


def drafting_model():
    """Another model, which agrees with `main_model` now and then."""
    other = main_model()
    generator = torch.Generator().manual_seed(1)
    for weight in other.parameters():
        weight.data += 0.02 * torch.randn(weight.shape, generator=generator)
    return other


def prompts(*lengths: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts; each repeats itself, so that prompt lookup finds something."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        period = torch.randint(3, 128, (-(-length // 2),), generator=generator)
        ids[row, -length:], mask[row, -length:] = period.repeat(2)[:length], 1
    return {"input_ids": ids, "attention_mask": mask}


def own_prompt(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One row of `inputs` without its padding."""
    shown = inputs["attention_mask"][row].bool()
    return {name: tensor[row : row + 1, shown] for name, tensor in inputs.items()}


def tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (rows, count), generator=torch.Generator().manual_seed(seed))


def generate(model, inputs, seed: int = 3, **kwargs):
    """`generate`, seeded, with the logits and the cache."""
    torch.manual_seed(seed)
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **{**options, **kwargs})


def assert_same_run(ours, theirs, tolerance: float = ROUNDING) -> None:
    """The same tokens, by the same logits at every step."""
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert len(ours.logits) == len(theirs.logits)
    for step, (logits, expected) in enumerate(zip(ours.logits, theirs.logits)):
        assert_close(f"logits of step {step}", logits, expected, tolerance)


def conversation(run, cache, turns, whole=True, answer=11):
    """What `run(cache, inputs)` generates in turns; each adds a message, left-padded as a batch of its own.

    Args:
        turns: for every turn, `input_ids` and `attention_mask` of the messages.
        whole: whether every turn is given all tokens again, or only those that the cache has not seen.
    """
    outs = []
    ids = mask = torch.zeros(len(turns[0]["input_ids"]), 0, dtype=torch.long)
    for turn in turns:
        ids, mask = torch.cat([ids, turn["input_ids"]], 1), torch.cat([mask, turn["attention_mask"]], 1)
        unseen = ids if whole else ids[:, cache.get_seq_length() :]
        outs.append(run(cache, {"input_ids": unseen, "attention_mask": mask}))
        ids, mask = torch.cat([ids, outs[-1].sequences[:, -answer:]], 1), pad(mask, (0, answer), value=1)
    return outs


class Recorder(BaseStreamer):
    """A streamer that remembers what it was given."""

    def __init__(self) -> None:
        self.given, self.ended = [], False

    def put(self, value):
        self.given.append(value.flatten().tolist())

    def end(self):
        self.ended = True


class Forced(LogitsProcessor):
    """Makes `generate` choose the given tokens, `[rows, steps]`, one column a step."""

    def __init__(self, chosen: torch.Tensor) -> None:
        self.steps = iter(chosen.T)

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -1e9).scatter(1, next(self.steps)[:, None], 0.0)
