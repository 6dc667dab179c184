"""Pieces join to the decoding of all ids, whatever the tokenizer; stop strings cut where they begin."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import CORPUS, MANY, build

from pdctl.core.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopChecker
from pdctl.core.tokenizer import Tokenizer

TEXTS = [
    *CORPUS,
    "",
    " ",
    "   leading spaces and  inner   runs ",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and flags 🇫🇷🇩🇪 end",
    "한국어와 日本語 mixed with ASCII",
    "a\u2028b\x85c\ttab\r\nnewline",
    "a literal \ufffd in the text \ufffd",
    "<0x41> is not a byte token when it is text",
]


def stream(tokenizer: Tokenizer, ids: list[int], sizes: random.Random | None = None) -> list[str]:
    detokenizer, pieces, at = tokenizer.detokenizer(), [], 0
    while at < len(ids):
        size = 1 if sizes is None else sizes.randint(0, 5)
        pieces.append(detokenizer.push(ids[at : at + size]))
        at += size
    pieces.append(detokenizer.flush())
    return pieces


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_reference(kind: str, text: str) -> None:
    tokenizer = build(kind)
    ids = tokenizer.encode(text * 3)
    reference = tokenizer.decode(ids)
    assert "".join(stream(tokenizer, ids)) == reference
    assert "".join(stream(tokenizer, ids, random.Random(len(text)))) == reference
    if kind == "bytelevel":
        assert reference == text * 3


@pytest.mark.parametrize("kind", MANY)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_join_to_the_reference(kind: str, data: st.DataObject) -> None:
    tokenizer = build(kind)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=80))
    assert "".join(stream(tokenizer, ids, random.Random(len(ids)))) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", MANY)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_broken_bytes_join_to_the_reference(kind: str, data: st.DataObject) -> None:
    """Half characters, stray continuation bytes and special tokens between them, in long runs."""
    tokenizer = build(kind)
    odd = [token for token in range(len(tokenizer)) if REPLACEMENT in tokenizer.decode([token])]
    good = tokenizer.encode("é日😀 x")
    ids = data.draw(st.lists(st.sampled_from([*odd[::9], *good, 1, 2]), max_size=120))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", MANY)
def test_no_piece_holds_half_a_character(kind: str) -> None:
    tokenizer = build(kind)
    text = "smile 😀😃😄 안녕 ok"
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert REPLACEMENT not in "".join(pieces)
    assert "".join(pieces).strip() == text


def test_text_comes_without_delay() -> None:
    tokenizer = build("bytelevel")
    ids = tokenizer.encode(CORPUS[0])
    detokenizer = tokenizer.detokenizer()
    for number, token in enumerate(ids, 1):
        assert detokenizer.push([token]) == tokenizer.decode(ids[:number])[len(tokenizer.decode(ids[: number - 1])) :]


def test_a_character_that_never_completes_is_flushed() -> None:
    tokenizer = build("bytelevel")
    ids = tokenizer.encode("ok 😀")[:-1]
    pieces = stream(tokenizer, ids)
    assert REPLACEMENT not in "".join(pieces[:-1])
    assert pieces[-1] == REPLACEMENT


def test_first_space_is_dropped_once_and_later_ones_are_kept() -> None:
    tokenizer = build("llama")
    ids = tokenizer.encode("time upon a time")
    pieces = [piece for piece in stream(tokenizer, ids) if piece]
    assert not pieces[0].startswith(" ")
    assert "".join(pieces) == "time upon a time"
    # After a special token the window has no text to lean on; the space must come nevertheless.
    assert "".join(stream(tokenizer, [*ids, 2, *ids])) == tokenizer.decode([*ids, 2, *ids])


@pytest.mark.parametrize("kind", [*MANY, "rubbish"])
def test_cost_is_linear(kind: str) -> None:
    """Also of what no model means to say, and a client can have it say with logit_bias: bytes that are no text."""
    tokenizer = build("bytelevel" if kind == "rubbish" else kind)
    ids = tokenizer.encode(" ".join(CORPUS[:1] * 60))
    if kind == "rubbish":
        odd = [token for token in range(len(tokenizer)) if tokenizer.decode([token]) == REPLACEMENT]
        ids = random.Random(1).choices(odd, k=2000)
    decoded = 0

    def counting(window: list[int]) -> str:
        nonlocal decoded
        decoded += len(window)
        return tokenizer.decode(window)

    detokenizer = IncrementalDetokenizer(counting)
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids)
    assert decoded < 40 * len(ids)


# --- single tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_join_to_the_text(kind: str, text: str) -> None:
    tokenizer = build(kind)
    ids = tokenizer.encode(text)
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    # SentencePiece writes a space before the first word, and decoding takes it away again.
    assert joined == text if kind == "bytelevel" else joined.removeprefix(" ") == tokenizer.decode(ids)


def test_bytes_of_special_and_of_missing_tokens() -> None:
    for kind in MANY:
        tokenizer = build(kind)
        assert tokenizer.token_bytes(2) == b"</s>"
        assert tokenizer.token_bytes(len(tokenizer) + 5) == b""
    tokenizer = build("bytelevel")
    halves = [tokenizer.token_bytes(token) for token in tokenizer.encode("😀")]
    assert len(halves) > 1 and b"".join(halves) == "😀".encode()


# --- stop strings ----------------------------------------------------------------------------------------------


def cut(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    checker, shown = StopChecker(stops), ""
    for piece in pieces:
        text, stopped = checker.push(piece)
        shown += text
        if stopped:
            return shown, True
    text, stopped = checker.flush()
    return shown + text, stopped


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hello", " wor", "ld and", " more"], ["world"], "Hello "),
        (["a", "b", "c", "d"], ["bc"], "a"),
        (["aaa", "ab"], ["aab"], "aa"),
        (["abcabd"], ["abd"], "abc"),
        (["one two three"], ["three", "two"], "one "),
        (["hello"], ["ell", "hello"], ""),
        (["h", "e", "l", "l", "o"], ["ell", "hello"], ""),
        (["h", "e", "l", "l", "x"], ["ell", "hello"], "h"),
        (["h", "e", "l", "l"], ["ell", "hello"], "h"),
        (["stop at once"], ["s"], ""),
        (["\n", "\n"], ["\n\n"], ""),
        (["", "", "x"], ["x"], ""),
    ],
)
def test_stop_cuts_before_its_first_occurrence(pieces: list[str], stops: list[str], expected: str) -> None:
    assert cut(pieces, stops) == (expected, True)


def test_a_begun_stop_is_held_back_and_then_shown() -> None:
    checker = StopChecker(["<END>"])
    assert checker.push("text <EN") == ("text ", False)
    assert checker.push("T") == ("<ENT", False)
    assert checker.push(" <EN") == (" ", False)
    assert checker.flush() == ("<EN", False)


@pytest.mark.parametrize(
    ("pieces", "num_exempt", "expected"),
    [
        (["ab", "x", "ab", "y"], 2, ("abx", True)),
        (["ab", "x", "ab", "y"], 4, ("abxaby", False)),
        # One that is begun in time and ends later counts; one that is complete in time never does.
        (["xa", "b"], 1, ("x", True)),
        (["xab", "ab"], 1, ("xab", True)),
        (["aa", "bc"], 1, ("a", True)),
        (["xabc", "d"], 1, ("xabcd", False)),
    ],
)
def test_early_stops_are_text(pieces: list[str], num_exempt: int, expected: tuple[str, bool]) -> None:
    checker, shown = StopChecker(["ab", "abcde"]), ""
    for number, piece in enumerate(pieces, 1):
        text, stopped = checker.push(piece, exempt=number <= num_exempt)
        shown += text
        if stopped:
            break
    text, stopped = checker.flush()
    assert (shown + text, stopped) == expected


def test_nothing_comes_after_the_stop() -> None:
    checker = StopChecker(["b"])
    assert checker.push("abc") == ("a", True)
    assert checker.push("more") == ("", True)
    assert checker.flush() == ("", True)


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab c", max_size=40),
    stops=st.lists(st.text("ab c", min_size=1, max_size=5), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 16),
)
def test_cut_does_not_depend_on_pieces_or_order(text: str, stops: list[str], seed: int) -> None:
    chance = random.Random(seed)
    pieces, at = [], 0
    while at < len(text):
        size = chance.randint(1, 4)
        pieces.append(text[at : at + size])
        at += size
    first = min((found for stop in stops if (found := text.find(stop)) >= 0), default=-1)
    assert cut(pieces, stops) == ((text, False) if first < 0 else (text[:first], True))
