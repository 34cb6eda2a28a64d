"""Published blocks have one size and unguessable hashes, however the tree cuts texts."""

from __future__ import annotations

from dataclasses import dataclass, field

from support.programs.kv_subscriber import WorkerBlocks

from machd.engine.protocol.media import FIRST_MEDIA_KEY
from machd.engine_process.block_ledger import BlockLedger
from machd.link.block_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from machd.scheduler.block_tree import Block, BlockTree

SIZE = 4


@dataclass
class Books:
    """A tree, its ledger and a router's view of what the ledger published."""

    secret: bytes = b"a secret"
    events: list[KvEvent] = field(default_factory=list)
    seen: WorkerBlocks = field(default_factory=WorkerBlocks)

    def __post_init__(self) -> None:
        self.tree = BlockTree(b"model")
        self.ledger = BlockLedger(self._publish, SIZE, self.secret)

    def _publish(self, event: KvEvent) -> None:
        self.events.append(event)
        self.seen.apply(event)

    def add(self, parent: Block, *tokens: int) -> Block:
        """A block in memory."""
        block = self.tree.add(parent, tokens)
        self.ledger.entered(block)
        return block

    @property
    def texts(self) -> set[tuple[int, ...]]:
        """What a router knows."""
        return set(self.seen.texts.values())


def test_a_ledger_begins_with_an_empty_cache() -> None:
    """A router that knew the worker before its restart forgets what it had."""
    assert Books().events == [AllBlocksCleared()]


def test_a_block_of_the_tree_is_published_in_whole_blocks() -> None:
    """Two blocks of 4 tokens for 9 tokens; the parent of the first is None."""
    books = Books()
    books.add(books.tree.root(""), *range(9))
    (stored,) = books.events[1:]
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.parent_block_hash) == (tuple(range(8)), None)
    assert (stored.block_size, stored.medium, stored.lora_id) == (SIZE, "GPU", None)
    assert books.texts == {(0, 1, 2, 3), tuple(range(8))}


def test_a_published_block_may_span_blocks_of_the_tree() -> None:
    """It belongs to the one with its last token, and has the tokens of all."""
    books = Books()
    first = books.add(books.tree.root(""), 0, 1)
    second = books.add(first, 2)
    assert not books.texts
    third = books.add(second, 3, 4, 5)
    assert books.texts == {(0, 1, 2, 3)}
    books.add(third, 6, 7)
    assert books.texts == {(0, 1, 2, 3), tuple(range(8))}
    books.ledger.left(third.children[6])
    assert books.texts == {(0, 1, 2, 3)}


def test_a_split_block_is_published_as_before() -> None:
    """Nothing is told; each half takes along what ends in it, and a branch has the common parent."""
    books = Books()
    block = books.add(books.tree.root(""), *range(9))
    count = len(books.events)
    head = books.tree.split(block, 6)
    books.ledger.was_split(head, block)
    assert len(books.events) == count
    books.add(head, 60, 70, 80)
    assert (0, 1, 2, 3, 4, 5, 60, 70) in books.texts
    books.ledger.left(block)
    assert books.texts == {(0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 60, 70)}


def test_parents_that_were_not_told_are_published_first() -> None:
    """A block that the engine has is published with all before it."""
    books = Books()
    parent = books.tree.add(books.tree.root(""), (0, 1, 2, 3))
    books.add(parent, 4, 5, 6, 7)
    assert books.texts == {(0, 1, 2, 3), tuple(range(8))}


def test_a_block_is_published_once_while_it_stays() -> None:
    """A block stored again under a new id is the same to a router."""
    books = Books()
    block = books.add(books.tree.root(""), *range(4))
    books.ledger.entered(block)
    assert len(books.events) == 2


def test_equal_texts_of_two_namespaces_have_unrelated_hashes() -> None:
    """Neither a hash nor its parent tells that two namespaces have the same text."""
    books = Books()
    for namespace in ("", "b"):
        books.add(books.tree.root(namespace), *range(8))
    assert len(books.seen.texts) == 4
    assert len(books.texts) == 2


def test_a_hash_cannot_be_computed_without_the_secret() -> None:
    """The same blocks of the same namespace have other hashes in another process."""
    found = []
    for secret in (b"one", b"two"):
        books = Books(secret=secret)
        books.add(books.tree.root("salt"), *range(4))
        found += list(books.seen.texts)
    assert len(set(found)) == 2


def test_an_image_ends_what_is_published_of_a_text() -> None:
    """Keys of an image are no token ids, which are all that a router can compute."""
    books = Books()
    first = books.add(books.tree.root(""), *range(4))
    image = books.add(first, FIRST_MEDIA_KEY | 1, FIRST_MEDIA_KEY | 2, 5, 6)
    behind = books.add(image, *range(8))
    assert books.texts == {(0, 1, 2, 3)}
    head = books.tree.split(image, 2)
    books.ledger.was_split(head, image)
    for one in (behind, image, head):
        books.ledger.left(one)
    assert books.texts == {(0, 1, 2, 3)}


def test_removed_blocks_are_told_together() -> None:
    """One event names all that ended in a block of the tree."""
    books = Books()
    block = books.add(books.tree.root(""), *range(9))
    books.ledger.left(block)
    books.ledger.left(block)
    removed = books.events[-1]
    assert isinstance(removed, BlockRemoved)
    assert len(removed.block_hashes) == 2
    assert not books.texts
    books.ledger.cleared()
    assert isinstance(books.events[-1], AllBlocksCleared)
