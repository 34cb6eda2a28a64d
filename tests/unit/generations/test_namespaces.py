"""Namespaces: no two parties get one name, whatever they call themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from machd.generations.service import cache_namespace, decode_namespace

_NAMES = st.text(max_size=12) | st.sampled_from(["a", "a/b", "b", '","', '"', "null", "\\", "key"])
_SALTS = st.none() | _NAMES


@given(_NAMES, _SALTS, _NAMES, _SALTS)
def test_two_parties_never_share_by_chance(
    client: str, salt: str | None, other: str, other_salt: str | None
) -> None:
    """Equal names mean the same client and the same salt."""
    is_same = (client, salt) == (other, other_salt)
    assert (decode_namespace(client, salt) == decode_namespace(other, other_salt)) is is_same
    own = cache_namespace(client, salt, is_shared=False)
    assert (own == cache_namespace(other, other_salt, is_shared=False)) is is_same


@given(_NAMES, _SALTS, _NAMES, _SALTS)
def test_what_is_shared_is_nobody_s_own(
    client: str, salt: str | None, other: str, other_salt: str | None
) -> None:
    """Sharing goes by the salt alone, and finds nothing that a key has kept to itself."""
    shared = cache_namespace(client, salt, is_shared=True)
    assert (shared == cache_namespace(other, other_salt, is_shared=True)) is (salt == other_salt)
    assert shared != cache_namespace(other, other_salt, is_shared=False)
