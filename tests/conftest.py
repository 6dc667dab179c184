"""Shared by all tests: small checkpoints, made once a session, and the environment that daemons run in."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdctl.core.numerics import environment, numerics

# Before torch is loaded by anybody: the arithmetic that daemons use.
os.environ.update(environment(numerics("float32")))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell's background has SIGINT ignored, nohup SIGHUP, and both hand that on to whatever is started: here Ctrl-C is
# tested, and a terminal that closes.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 384,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def byte_tokenizer() -> object:
    """One token a byte (id = byte + 3), and three special ones: no training, every text has ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: index + 3 for index, letter in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
    )


def make_checkpoint(directory: Path, family: str = "Llama", **changes: object) -> Path:
    """A random checkpoint of a decoder family, with tokenizer: bits depend on the seed alone."""
    import torch
    import transformers

    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = model_class.config_class(**{**TINY, **changes})
    torch.manual_seed(7)
    model = model_class(config)
    # Weights larger than at initialisation: logits far enough apart to be worth comparing.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)  # type: ignore[attr-defined]
    return directory


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Beside others, files that start clusters come first: they take long, and what is short fills the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: "e2e" not in item.keywords)


@pytest.fixture(scope="session", autouse=True)
def _one_command_tree() -> Iterator[None]:
    """Commands that run in this process share one tree: to make it takes longer than most of them."""
    import typer.testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def checkpoint_maker() -> object:
    """`make_checkpoint`, for tests in other folders (importlib mode has no imports between them)."""
    return make_checkpoint
