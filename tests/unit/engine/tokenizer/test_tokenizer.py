"""Text to ids and back, from any thread, without losing or inventing a byte."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from unit.engine.gguf_writer import llama_metadata
from unit.engine.tiny_llama import TOKENS, TinyLlama

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.loading.formats.gguf.header import GgufHeader, read_gguf_header
from machd.engine.loading.formats.gguf.tokenizer import GgufVocabulary, build_tokenizer
from machd.engine.loading.loader import load_model
from machd.engine.loading.tokenizer_files import gguf_tokenizer
from machd.engine.protocol.tokenizer import Detokenizer
from machd.engine.tokenizer.detokenizer import ByteDetokenizer, WindowDetokenizer, decode_bytes
from machd.engine.tokenizer.token_table import TokenForm, TokenTable
from machd.engine.tokenizer.tokenizer import MlxTokenizer
from machd.errors import ChatTemplateMissingError, InvalidRequestError, ModelFormatError

pytestmark = pytest.mark.usefixtures("one_template_process")

PIECES = [
    "\u2581",
    "a",
    "b",
    "c",
    "ab",
    "\u2581a",
    "\u2581ab",
    "bc",
    "abc",
    "\u00e9",
    "ca",
    "\u2581c",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SCORES = [-30.0, -31.0, -32.0, -33.0, -2.0, -5.0, -4.0, -1.0, -3.0, -34.0, -6.0, -7.0]


@pytest.fixture(name="smollm", scope="module")
def _smollm(embedded_model_path: Path) -> MlxTokenizer:
    import_mlx_lm()
    return gguf_tokenizer(read_gguf_header(embedded_model_path), chat_template=None)[0]


def _built(metadata: dict[str, object]) -> GgufVocabulary:
    return build_tokenizer(GgufHeader(Path("t.gguf"), metadata, ()))  # type: ignore[arg-type]


@functools.cache
def _byte_level() -> Tokenizer:
    return _built(llama_metadata()).tokenizer  # type: ignore[no-any-return]


@functools.cache
def _sentence_piece() -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
    metadata = llama_metadata(
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__scores=[0.0] * 259 + SCORES,
        tokenizer__ggml__token_type=[2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
    )
    return _built(metadata).tokenizer  # type: ignore[no-any-return]


def _streamed(detokenizer: Detokenizer, token_ids: Sequence[int]) -> str:
    return "".join(detokenizer.push(token_id) for token_id in token_ids) + detokenizer.finish()


byte_level_ids = st.lists(st.integers(0, len(TOKENS) - 1), max_size=40)
sentence_piece_ids = st.lists(st.integers(0, 258 + len(PIECES)), max_size=40)


@given(byte_level_ids)
def test_streamed_text_is_the_decoded_text(token_ids: list[int]) -> None:
    """Byte-level: for any ids, broken characters included, what the library itself decodes."""
    backend = _byte_level()
    table = TokenTable(backend)
    assert table.form is TokenForm.BYTE_LEVEL
    expected = backend.decode(token_ids, skip_special_tokens=True)
    assert _streamed(ByteDetokenizer(table), token_ids) == expected
    assert decode_bytes(table, token_ids) == expected


@given(sentence_piece_ids)
def test_sentence_piece_streams_to_its_own_decoding(token_ids: list[int]) -> None:
    """Parts join to the whole for any ids; the library agrees wherever the bytes are text.

    It writes one U+FFFD for each byte of a broken run and would hold text back to know the run's
    end; machd writes one for each broken character, as everywhere else.
    """
    backend = _sentence_piece()
    table = TokenTable(backend)
    assert table.form is TokenForm.SENTENCE_PIECE
    streamed = _streamed(ByteDetokenizer(table), token_ids)
    assert streamed == decode_bytes(table, token_ids)
    expected = backend.decode(token_ids, skip_special_tokens=True)
    if "\ufffd" not in expected:
        assert streamed == expected


@given(byte_level_ids)
def test_the_window_joins_to_the_whole(token_ids: list[int]) -> None:
    """The general way gives the same text as the exact one, for any ids."""
    backend = _byte_level()
    decode = functools.partial(backend.decode, skip_special_tokens=True)
    assert _streamed(WindowDetokenizer(decode), token_ids) == decode(token_ids)


@given(st.text(max_size=30))
@example("<|endoftext|>")
def test_no_replacement_is_shown_before_its_character_is_whole(text: str) -> None:
    """Token by token, everything shown so far is a prefix of the final text."""
    backend = _byte_level()
    token_ids = backend.encode(text, add_special_tokens=False).ids
    # The text itself, but for what spells a special token, which is none of the text.
    final = backend.decode(token_ids, skip_special_tokens=True)
    for detokenizer in (
        ByteDetokenizer(TokenTable(backend)),
        WindowDetokenizer(functools.partial(backend.decode, skip_special_tokens=True)),
    ):
        shown = ""
        for token_id in token_ids:
            shown += detokenizer.push(token_id)
            assert final.startswith(shown)
        assert shown + detokenizer.finish() == final


@given(st.text(max_size=60))
def test_byte_level_text_survives_the_round_trip(text: str) -> None:
    """Every text has ids, and they decode to it; token bytes join to its UTF-8."""
    backend = _byte_level()
    table = TokenTable(backend)
    token_ids = backend.encode(text, add_special_tokens=False).ids
    assert backend.decode(token_ids, skip_special_tokens=False) == text
    assert b"".join(table.bytes_of(token_id) for token_id in token_ids) == text.encode()


@given(st.text(max_size=40).filter(lambda text: not text.startswith(" ")))
def test_sentence_piece_text_survives_the_round_trip(text: str) -> None:
    """Byte fallback covers what the pieces do not; the added first space is taken off again."""
    if any(name in text for name in ("\u2581", "<s>", "</s>", "<unk>")):
        return
    backend = _sentence_piece()
    token_ids = backend.encode(text, add_special_tokens=False).ids
    assert decode_bytes(TokenTable(backend), token_ids) == text


@given(st.text(alphabet="abc ", max_size=24))
def test_merges_from_scores_cut_as_sentence_piece_does(text: str) -> None:
    """Joining the best-scored neighbours, leftmost first, gives the same pieces."""
    score_of = dict(zip(PIECES, SCORES, strict=True))
    pieces = list(("\u2581" + text.replace(" ", "\u2581")) if text else "")
    while True:
        joins = [
            (-score_of[left + right], index)
            for index, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in score_of
        ]
        if not joins:
            break
        _, index = min(joins)
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
    assert _sentence_piece().encode(text, add_special_tokens=False).tokens == pieces


def test_begin_token_is_added_on_request_only() -> None:
    """SentencePiece models begin with ``<s>``; a rendered chat is encoded without another."""
    backend = _sentence_piece()
    assert backend.encode("ab", add_special_tokens=True).tokens[0] == "<s>"
    assert "<s>" not in backend.encode("ab", add_special_tokens=False).tokens


def test_smollm_cuts_text_as_it_was_trained(smollm: MlxTokenizer) -> None:
    """Special tokens are one id each, digits stand alone, and known text has its known ids."""
    encode = functools.partial(smollm.encode, add_special_tokens=False)
    assert encode("<|im_start|>") == [1]
    assert encode("a<|im_end|>b")[1] == 2
    assert len(encode("2024")) == 4
    assert [smollm.token_bytes(token_id) for token_id in encode("The capital of France")] == [
        b"The",
        b" capital",
        b" of",
        b" France",
    ]
    assert smollm.token_bytes(2) == b"<|im_end|>"
    assert smollm.vocabulary_tokens == 49_152
    assert smollm.eos_token_ids == {0, 2}


@given(token_ids=st.lists(st.integers(0, 49_151), max_size=12))
def test_smollm_streams_what_it_decodes(smollm: MlxTokenizer, token_ids: list[int]) -> None:
    """The same for the real vocabulary, and against the library."""
    expected = smollm.wrapped.backend_tokenizer.decode(token_ids, skip_special_tokens=True)
    assert _streamed(smollm.detokenizer(), token_ids) == smollm.decode(token_ids) == expected


def test_threads_share_one_tokenizer(smollm: MlxTokenizer) -> None:
    """Eight threads encode and render at once and get what one gets; nothing is borrowed twice."""
    texts = [f"{number} sheep and {number + 1} goats " * 20 for number in range(64)]
    alone = [smollm.encode(text, add_special_tokens=bool(i % 2)) for i, text in enumerate(texts)]

    def work(index: int) -> list[int]:
        smollm.render_chat([{"role": "user", "content": texts[index]}])
        return smollm.encode(texts[index], add_special_tokens=bool(index % 2))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(64))) == alone


def test_a_chat_is_rendered_with_and_without_the_generation_prompt(tiny: TinyLlama) -> None:
    """The prompt ends where the model goes on, unless that is not wanted."""
    tokenizer = load_model(tiny.source).tokenizer
    messages: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
    whole = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages) == whole
    without = tokenizer.render_chat(messages, add_generation_prompt=False)
    assert without == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "content": "x"}, "tools are not for me"),
        ({"role": "user", "content": ["parts"]}, "cannot render"),
        ({"role": "user"}, "content"),
    ],
)
def test_template_refusal_is_an_invalid_request(
    tiny: TinyLlama, message: dict[str, object], words: str
) -> None:
    """A conversation that the template cannot take is a 400 with the template's own words."""
    tokenizer = load_model(tiny.source).tokenizer
    with pytest.raises(InvalidRequestError, match=words) as caught:
        tokenizer.render_chat([message])
    assert caught.value.param == "messages"


def test_templates_run_in_a_sandbox(tiny: TinyLlama) -> None:
    """A template comes with the weights and must not reach the interpreter."""
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (tiny.path / "chat_template.jinja").write_text(escape)
    tokenizer = load_model(tiny.source).tokenizer
    with pytest.raises(InvalidRequestError):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_without_chat_messages_are_refused(tiny: TinyLlama) -> None:
    """``none`` serves prompts; a conversation is answered with a stable error."""
    tokenizer = load_model(tiny.source, chat_template="none").tokenizer
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateMissingError):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.encode("hello", add_special_tokens=False)


def test_unknown_pre_tokenizer_is_noted() -> None:
    """It works with GPT-2's, and a person reads why text may be cut otherwise."""
    built = _built(llama_metadata(tokenizer__ggml__pre="brand-new"))
    assert "brand-new" in built.notes[0]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-2", "smollm"])
def test_known_pre_tokenizers_lose_nothing(pre: str) -> None:
    """Every known way of cutting keeps the text whole and says nothing."""
    built = _built(llama_metadata(tokenizer__ggml__pre=pre))
    text = "It's 12345  words,\n\n\tnaïve — 日本語 😀 x_y"
    token_ids = built.tokenizer.encode(text, add_special_tokens=False).ids
    assert built.tokenizer.decode(token_ids) == text
    assert built.notes == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer__ggml__model": "bert"},
        {"tokenizer__ggml__tokens": None},
        {"tokenizer__ggml__tokens": ["a", "b"]},
        {"tokenizer__ggml__merges": ["nowhere tobefound"]},
        {"tokenizer__ggml__model": "llama"},
    ],
)
def test_a_broken_tokenizer_is_a_format_error(changes: dict[str, object]) -> None:
    """Missing, inconsistent or foreign: a message, before any weight is read."""
    with pytest.raises(ModelFormatError):
        _built(llama_metadata(**changes))


def test_other_decoders_use_the_window() -> None:
    """A decoder that is neither of the two kinds is asked itself, and loses nothing."""
    vocabulary = {"[UNK]": 0, "green": 1, "##house": 2, "plant": 3, "##s": 4}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    assert TokenTable(backend).form is TokenForm.OTHER
    decode = functools.partial(backend.decode, skip_special_tokens=True)
    assert _streamed(WindowDetokenizer(decode), [1, 2, 3, 4, 3]) == "greenhouse plants plant"


def test_unknown_ids_stand_for_nothing() -> None:
    """Ids beyond the vocabulary, which a padded head can give, are no text and no crash."""
    table = TokenTable(_byte_level())
    assert table.bytes_of(10**6) == b""
    assert _streamed(ByteDetokenizer(table), [10**6, -1]) == ""
