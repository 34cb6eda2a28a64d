"""A file is read as good only if every byte of it is the one that was written."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from support.engines.block_samples import content_of, is_same_content, saved_block

from machd.engine.prefix_blocks.encoding import (
    MAX_HEADER_BYTES,
    BlockContent,
    decode_block,
    encode_block,
    header_stop,
    read_head,
)

KEY = b"a key"
SAVED = saved_block(1, parent=saved_block(0), has_state=True)
ZEROS = b"0" * 64
MARK = b'"checksum":"'


def _whole() -> bytes:
    return b"".join(encode_block(SAVED, content_of(SAVED, 128), KEY))


def _signed(header: bytes, data: bytes) -> bytes:
    """Make a file with a foreign header and a checksum that is right."""
    whole = len(header).to_bytes(8, "little") + header + data
    at = whole.index(MARK) + len(MARK)
    assert whole[at : at + 64] == ZEROS
    return whole[:at] + hashlib.sha256(whole).hexdigest().encode() + whole[at + 64 :]


def _parts(whole: bytes) -> tuple[dict[str, dict[str, object]], bytes]:
    stop = header_stop(whole)
    header = json.loads(whole[8:stop])
    header["__metadata__"]["checksum"] = ZEROS.decode()
    return header, whole[stop:]


def _with_header(changes: Mapping[str, object]) -> bytes:
    """Make a file with another header, and a checksum that is right."""
    header, data = _parts(_whole())
    text = json.dumps({**header, **changes}, separators=(",", ":")).encode()
    return _signed(text, data)


def _with_head(**changes: object) -> bytes:
    """Make a file with another head, and a checksum that is right."""
    metadata = _parts(_whole())[0]["__metadata__"]
    head = json.loads(str(metadata["machd_block"])) | changes
    return _with_header({"__metadata__": metadata | {"machd_block": json.dumps(head)}})


def test_written_block_comes_back() -> None:
    """Floats, integers and booleans, arrays without dimensions and without elements, and notes."""
    whole = _whole()
    assert is_same_content(decode_block(whole, SAVED, KEY), content_of(SAVED, 128))
    head = read_head(whole[: header_stop(whole)], len(whole), KEY)
    assert head is not None
    assert head.saved(5.0) == replace(SAVED, used_unix_s=5.0)


def test_signed_file_is_good() -> None:
    """The changes of the tests below are all that makes their files bad."""
    assert is_same_content(decode_block(_with_header({}), SAVED, KEY), content_of(SAVED, 128))
    assert is_same_content(decode_block(_with_head(), SAVED, KEY), content_of(SAVED, 128))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_memory_layout_of_arrays_does_not_matter(order: str, is_cut: bool) -> None:  # noqa: FBT001
    """Arrays may be cut out of others, or lie the other way round."""
    array = np.array(np.arange(60).reshape(3, 4, 5), order="F" if order == "F" else "C")
    array = array[:, 1:3, ::2] if is_cut else array
    whole = b"".join(encode_block(SAVED, BlockContent({"a": array}, {}), KEY))
    found = decode_block(whole, SAVED, KEY)
    assert found is not None
    assert np.array_equal(found.arrays["a"], array)


def test_truncated_file_is_refused() -> None:
    """No beginning of a file is read as good."""
    whole = _whole()
    assert len(whole) < 4000
    for stop in range(len(whole)):
        assert decode_block(whole[:stop], SAVED, KEY) is None
        assert read_head(whole[:stop], stop, KEY) is None


def test_grown_file_is_refused() -> None:
    """A file with more bytes than were written is not read as good."""
    for more in (b"\0", b"x" * 100):
        assert decode_block(_whole() + more, SAVED, KEY) is None


def test_flipped_bit_is_noticed() -> None:
    """Every bit of the header's first bytes and of the checksum, and a thousand others."""
    whole = _whole()
    at = whole.index(MARK)
    bits = {*range(80), *range(at * 8, (at + 80) * 8)}
    bits |= set(random.Random(7).sample(range(len(whole) * 8), 1000))
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode_block(bytes(damaged), SAVED, KEY) is None, bit


def test_swapped_and_zeroed_pages_are_noticed() -> None:
    """A torn write leaves pages that never came, or came in another order."""
    whole = b"".join(encode_block(SAVED, content_of(SAVED, 1 << 16), KEY))
    pages = [whole[i : i + 4096] for i in range(0, len(whole), 4096)]
    for i in range(len(pages)):
        zeroed = [*pages[:i], bytes(len(pages[i])), *pages[i + 1 :]]
        assert decode_block(b"".join(zeroed), SAVED, KEY) is None
    for i in range(len(pages) - 2):
        swapped = [*pages[:i], pages[i + 1], pages[i], *pages[i + 2 :]]
        assert decode_block(b"".join(swapped), SAVED, KEY) is None


@pytest.mark.parametrize(
    "wanted",
    [
        replace(SAVED, digest=b"x" * 16),
        replace(SAVED, parent=b"x" * 16),
        replace(SAVED, start=SAVED.start + 1),
        replace(SAVED, token_ids=(*SAVED.token_ids[:-1], 5)),
        replace(SAVED, token_ids=SAVED.token_ids[:-1]),
        replace(SAVED, token_ids=(*SAVED.token_ids, 5)),
        replace(SAVED, has_state=False),
    ],
)
def test_file_of_another_block_is_refused(wanted: object) -> None:
    """An intact file of another block, or of the same text cut elsewhere, is of no use."""
    assert wanted != SAVED
    assert decode_block(_whole(), wanted, KEY) is None  # type: ignore[arg-type]


def test_file_of_another_key_is_refused() -> None:
    """A file that another model left is of no use, though it lies in the right place."""
    assert decode_block(_whole(), SAVED, b"another key") is None
    assert read_head(_whole(), len(_whole()), b"another key") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0},
        {"version": 1},
        {"version": "1"},
        {"version": 10**400},
        {"start": -1},
        {"start": 1.5},
        {"token_ids": ""},
        {"token_ids": "AAAA"},  # three bytes
        {"token_ids": "%%%%"},
        {"token_ids": None},
        {"data_bytes": 0},
        {"data_bytes": 1 << 70},
        {"digest": "AAAA"},
        {"notes": {"a": 1}},
        {"notes": []},
    ],
)
def test_impossible_head_is_refused(changes: dict[str, object]) -> None:
    """A right checksum does not make machd read nonsense."""
    assert decode_block(_with_head(**changes), SAVED, KEY) is None


_EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


@pytest.mark.parametrize(
    "changes",
    [
        {"0.keys": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},  # overlaps
        {"new": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"new": {"dtype": "F32", "shape": [1], "data_offsets": [1 << 40, (1 << 40) + 4]}},
        {"new": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}},
        {"new": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"new": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"new": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"new": {"dtype": "F33", "shape": [0], "data_offsets": [0, 0]}},
        {"new": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}},
        {"0.keys": _EMPTY},  # leaves a hole
        {"__metadata__": {"checksum": ZEROS.decode()}},
        {"__metadata__": {"checksum": ZEROS.decode(), "machd_block": "[" * 100_000}},
        {"new": json.loads("[" * 400 + "]" * 400)},
    ],
)
def test_hostile_header_is_refused(changes: dict[str, object]) -> None:
    """Offsets that overlap or lie outside, shapes that overflow, types that do not exist."""
    assert decode_block(_with_header(changes), SAVED, KEY) is None


@pytest.mark.parametrize(
    "length", [0, 7, MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 1 << 40, (1 << 64) - 1]
)
def test_header_length_is_bounded(length: int) -> None:
    """The length is believed no further than there are bytes, and never above the limit."""
    whole = _whole()
    damaged = length.to_bytes(8, "little") + whole[8:]
    assert decode_block(damaged, SAVED, KEY) is None
    assert read_head(damaged, len(damaged), KEY) is None


def test_header_above_the_limit_is_refused() -> None:
    """A header that is complete and right may still be too long."""
    header, data = _parts(_whole())
    text = json.dumps(header, separators=(",", ":")).encode() + b" " * MAX_HEADER_BYTES
    assert decode_block(_signed(text, data), SAVED, KEY) is None
    with pytest.raises(ValueError, match="larger than any"):
        encode_block(SAVED, BlockContent({}, {"note": "x" * MAX_HEADER_BYTES}), KEY)


@pytest.mark.parametrize(
    ("saved", "content"),
    [
        (replace(SAVED, token_ids=(1 << 64,)), content_of(SAVED)),
        (replace(SAVED, token_ids=(-1,)), content_of(SAVED)),
        (SAVED, BlockContent({"a": np.array(["text"])}, {})),
        (SAVED, BlockContent({"a": np.array([object()])}, {})),
    ],
)
def test_unencodable_block_is_refused(saved: object, content: BlockContent) -> None:
    """Tokens and types that a file has no place for are refused, not changed."""
    with pytest.raises(Exception):  # noqa: B017, PT011 - the library's own kinds
        encode_block(saved, content, KEY)  # type: ignore[arg-type]
