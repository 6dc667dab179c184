"""Small trained tokenizers of every kind, for the tests of detokenizer and api."""

from __future__ import annotations

from functools import cache
from typing import Any

from pdctl.core.tokenizer import Tokenizer

CORPUS = [
    "Once upon a time there was a small daemon that lived in a shared segment.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))",
    "Der Bär hört süße Töne. Ça va, où est l'été? 안녕하세요 세계. 日本語のテキスト。",
]
MANY = ["bytelevel", "llama", "metaspace"]


@cache
def build(kind: str) -> Tokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    if kind == "bytelevel":
        inner = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        extra: list[str] = []
    else:
        inner = Inner(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        if kind == "llama":
            parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            inner.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
        else:
            inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        alphabet, extra = [], [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special + extra, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS[:2] if extra else CORPUS, trainer)
    if extra:
        # The trainer made the bytes special; a byte is text.
        state = inner.to_str().replace('"special":true', '"special":false')
        inner = Inner.from_str(state)
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    )
