"""Texts that begin alike are found to the token, and cut only where they part."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machd.scheduler.block_tree import Block, BlockTree, common_tokens

TEXT = tuple(range(10, 22))


def _chain(tree: BlockTree, root: Block, text: tuple[int, ...], *stops: int) -> list[Block]:
    blocks = [root]
    for stop in stops:
        blocks.append(tree.add(blocks[-1], text[blocks[-1].stop : stop]))
    return blocks[1:]


def test_a_text_is_followed_to_the_token() -> None:
    """A walk ends where the tree does, where the text does, or where both part in a block."""
    tree = BlockTree(b"model")
    root = tree.root("")
    first, second, third = _chain(tree, root, TEXT, 4, 8, 12)
    assert tree.walk(root, ()).tokens == 0
    assert tree.walk(root, (1, 2)).block is root
    for tokens, block, whole in [(3, first, root), (4, first, first), (6, second, first)]:
        for text in (TEXT[:tokens], (*TEXT[:tokens], 99)):
            walk = tree.walk(root, text)
            assert (walk.tokens, walk.block, walk.whole_block) == (tokens, block, whole)
    assert tree.walk(root, (*TEXT, 99)).block is third
    assert tree.walk(second, TEXT).tokens == 12, "a walk can go on where another one was"


def test_a_split_keeps_what_stands_behind() -> None:
    """The number and the children stay with what comes after the cut."""
    tree = BlockTree(b"model")
    first, second = _chain(tree, tree.root(""), TEXT, 4, 8)
    digest = first.digest
    head = tree.split(first, 1)
    assert [one.token_ids for one in second.path()] == [TEXT[:1], TEXT[1:4], TEXT[4:8]]
    assert (head.start, head.stop, first.start, first.stop) == (0, 1, 1, 4)
    assert second.path() == [head, first, second]
    assert first.digest == digest
    assert head.block_id not in {first.block_id, second.block_id}


@pytest.mark.parametrize("at", [0, 4, 5])
def test_both_halves_of_a_split_have_tokens(at: int) -> None:
    """Nothing is cut off."""
    tree = BlockTree(b"model")
    (first,) = _chain(tree, tree.root(""), TEXT, 4)
    with pytest.raises(AssertionError):
        tree.split(first, at)


@given(stops=st.sets(st.integers(1, 11)), cuts=st.sets(st.integers(1, 11)))
def test_a_digest_is_of_the_text_however_it_is_cut(stops: set[int], cuts: set[int]) -> None:
    """Any two ways of cutting a text give its end the same digest."""
    one, other = BlockTree(b"model"), BlockTree(b"model")
    last = _chain(one, one.root("a"), TEXT, *sorted(stops), 12)[-1]
    root = other.root("a")
    (whole,) = _chain(other, root, TEXT, 12)
    for cut in sorted(cuts):
        block = other.walk(root, TEXT[: cut + 1]).block
        if block.start < cut:
            other.split(block, cut - block.start)
    assert last.digest == whole.digest
    ends = {block.stop: block.digest for block in last.path()}
    assert all(ends.get(block.stop, block.digest) == block.digest for block in whole.path())
    assert len({block.digest for block in whole.path()}) == len(cuts) + 1


def test_a_digest_is_of_model_namespace_and_place() -> None:
    """Nothing that decides a block's content can be left out, or pass for something else."""
    letters = int.from_bytes(b"abcd", "little")
    digests = [
        _chain(tree, tree.root(namespace), text, len(text))[-1].digest
        for tree, namespace, text in [
            (BlockTree(b"model"), "x", (letters, 1)),
            (BlockTree(b"model"), "y", (letters, 1)),
            (BlockTree(b"other"), "x", (letters, 1)),
            (BlockTree(b"model"), "x", (1, letters)),
            (BlockTree(b"modelx"), "", (letters, 1)),
            (BlockTree(b"model"), "xabcd", (1,)),
        ]
    ]
    assert len(set(digests)) == len(digests)


def test_a_root_found_by_its_digest_is_the_namespace_s() -> None:
    """Blocks of an earlier daemon are found under the same digests."""
    tree = BlockTree(b"model")
    digest = BlockTree(b"model").root("a").digest
    found = tree.root_of(digest)
    (block,) = _chain(tree, found, TEXT, 4)
    other = BlockTree(b"model")
    assert block.digest == _chain(other, other.root("a"), TEXT, 4)[0].digest
    assert tree.root("a") is found
    assert tree.root("b") is not found


def test_a_digest_deep_down_needs_no_stack() -> None:
    """A text of thousands of blocks has one, whichever block is asked first."""
    tree = BlockTree(b"model")
    text = tuple(range(5000))
    last = _chain(tree, tree.root(""), text, *range(1, 5001))[-1]
    assert len(last.digest) == 16


def test_what_is_removed_takes_along_what_follows() -> None:
    """Its siblings stay."""
    tree = BlockTree(b"model")
    root = tree.root("")
    first, second, third = _chain(tree, root, TEXT, 4, 8, 12)
    sibling = tree.add(first, (1, 2))
    assert tree.remove(second) == [second, third]
    assert list(tree) == [first, sibling]


def test_namespaces_without_blocks_are_forgotten() -> None:
    """Empty namespaces are swept; those with blocks or pins stay."""
    tree = BlockTree(b"model")
    kept, running = tree.root("kept"), tree.root("running")
    tree.add(kept, (1,))
    running.pins += 1
    for number in range(5000):
        tree.root(f"salt {number}")
    assert len(tree._roots) <= 1024
    assert tree.root("kept") is kept
    assert tree.root("running") is running


@given(block=st.lists(st.integers(0, 2), max_size=6), text=st.lists(st.integers(0, 2), max_size=8))
def test_common_tokens_are_counted_from_the_first(block: list[int], text: list[int]) -> None:
    """Up to the first that differs, or the end of either."""
    for at in range(len(text) + 1):
        count = common_tokens(tuple(block), tuple(text), at)
        assert block[:count] == text[at : at + count]
        assert count == min(len(block), len(text) - at) or block[count] != text[at + count]


@pytest.mark.parametrize("length", [1, 2, 1023, 1024, 1025, 3000])
def test_long_texts_part_where_they_do(length: int) -> None:
    """Wherever that is, and whatever is known of them before."""
    text = tuple(range(length))
    for branch_point in {0, 1, length // 2, length - 1, length, 1023, 1024, 1025}:
        if branch_point <= length:
            other = (
                *text[:branch_point],
                *([-1] if branch_point < length else []),
                *text[branch_point + 1 :],
            )
            for known in {0, branch_point // 2, branch_point}:
                assert common_tokens(text, other, known=known) == branch_point
                assert common_tokens(text, (7, *other), 1, known=known) == branch_point


class _Counted(tuple[int, ...]):  # noqa: SLOT001 - it counts on itself
    """A text that counts how often a token or a slice of it is looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return super().__getitem__(at)


def test_texts_are_compared_in_few_slices() -> None:
    """50,000 tokens take a look for each 1,024 and a binary search, and texts apart from the start take few."""
    text = _Counted(range(50_000))
    assert common_tokens(text, (*text[:-1], -1)) == 49_999
    assert text.looks < 50_000 // 1024 + 20
    text.looks = 0
    assert common_tokens(text, (*range(10), -1, *range(11, 50_000))) == 10
    assert text.looks < 20
