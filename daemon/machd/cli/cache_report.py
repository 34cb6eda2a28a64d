"""Recorded requests replayed in the prefix cache: what was computed, why, and what would save most."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from machd.cli.cache_advice import advice
from machd.cli.cache_replay import CacheReplay
from machd.cli.cache_report_document import (
    CacheReport,
    Cause,
    LookupReport,
    PartCost,
    SkippedReport,
)
from machd.cli.changed_prompts import RenderedRequest, change_between
from machd.cli.recorded_requests import RecordedConversation, SkippedLine
from machd.cli.request_changes import Change
from machd.engine.protocol.engine import ModelFront
from machd.engine.protocol.media import Media
from machd.errors import MachdError
from machd.generations.service import cache_namespace
from machd.reading.conversation import NO_MEDIA, prepare_conversation
from machd.reading.normalised_messages import NormalisedMessages
from machd.reading.prompt_places import PromptPart, PromptPlace
from machd.reading.prompt_rules import TEMPLATE_DATE
from machd.request.conversation import Conversation
from machd.scheduler.block_tree import common_tokens
from machd.scheduler.events import CacheReason
from machd.scheduler.prefix_limits import PrefixConfig, PrefixLimits
from machd.settings.cache import PromptRuleName

_MIN_SAVED_TOKENS = 64
"""Fewest tokens behind a change that are worth a word: two conversations may have as many of the template's own in common."""

_MAX_COMPARED = 64
"""Most earlier prompts that one is compared with, the newest ones."""

DecodeMedia = Callable[[Conversation], Mapping[int, Media]]
"""Decodes the images and videos of a conversation, by the identities of their sources; raises MachdError if it cannot."""

_FINE = {CacheReason.WHOLE, CacheReason.CONTINUED}
_CHANGED = {CacheReason.DIVERGED, CacheReason.IMAGE_CHANGED, CacheReason.FIRST_SEEN}


def no_media(_: Conversation) -> Mapping[int, Media]:
    """Decode nothing."""
    return NO_MEDIA


@dataclass(slots=True)
class _CauseSums:
    """Sums of a cause over all requests."""

    change: Change | None
    lines: list[int] = field(default_factory=list)
    saved_tokens: int = 0
    spans: Counter[tuple[int, int]] = field(default_factory=Counter)


class CacheReporter:
    """Replays conversations, and sums up what happened."""

    def __init__(
        self,
        front: ModelFront,
        shape: PrefixConfig,
        limits: PrefixLimits,
        *,
        is_shared: bool,
        decode_media: DecodeMedia = no_media,
        rules: Collection[PromptRuleName] = (),
    ) -> None:
        """Start with an empty cache.

        Args:
            front: The model's template and tokenizer.
            shape: Block size, and the kind of the model's caches.
            limits: Limits of the cache.
            is_shared: Whether all clients share one namespace: ``cache.namespace``.
            decode_media: Decodes images and videos.
            rules: Names of the rules that take texts out of prompts: ``cache.normalise``.
        """
        self._front = front
        self._shape = shape
        self._is_shared = is_shared
        self._decode_media = decode_media
        self._rules = rules
        self._normalised = 0
        self._replay = CacheReplay(shape, limits)
        self._earlier: deque[tuple[str, RenderedRequest]] = deque(maxlen=_MAX_COMPARED)
        self._lookups: list[LookupReport] = []
        self._skipped: list[SkippedReport] = []
        self._parts: Counter[tuple[PromptPart | None, str | None]] = Counter()
        self._causes: dict[tuple[object, ...], _CauseSums] = {}
        self._long = 0

    def add(self, recorded: RecordedConversation | SkippedLine) -> None:
        """Replay the next request."""
        if isinstance(recorded, SkippedLine):
            self._skipped.append(SkippedReport(line=recorded.line, reason=recorded.reason))
            return
        sent = recorded.conversation
        left = NormalisedMessages(sent.messages, self._rules)
        # What rules take out is no difference between two requests.
        conversation = replace(sent, messages=left.messages)
        others = [one for one in self._rules if one == TEMPLATE_DATE]
        try:
            decoded = self._decode_media(conversation)
            prepared = prepare_conversation(conversation, self._front, decoded, others)
        except MachdError as error:
            reason = f"machd would refuse it: {error}"
            self._skipped.append(SkippedReport(line=recorded.line, reason=reason))
            return
        if not prepared.prompt:
            reason = "its prompt holds no token"
            self._skipped.append(SkippedReport(line=recorded.line, reason=reason))
            return
        namespace = cache_namespace(recorded.client, recorded.salt, is_shared=self._is_shared)
        request = RenderedRequest(recorded.line, conversation, prepared)
        self._normalised += bool(left.removed or prepared.removed)
        self._long += len(prepared.prompt) >= self._front.model.context_tokens
        self._look_up(request, namespace)
        self._earlier.append((namespace, request))

    def _look_up(self, request: RenderedRequest, namespace: str) -> None:
        found = self._replay.look_up(request.prompt, namespace, request.prepared.media)
        parted_at_tokens, change, saved_tokens = found.parted_at_tokens, None, 0
        place = request.place(parted_at_tokens)
        if found.reason in _CHANGED:
            former, common = self._nearest(request, namespace)
            if former is not None and common >= parted_at_tokens:
                change, saved_tokens = change_between(former, request, common)
        elif found.reason not in _FINE:
            within = None if found.reason is CacheReason.OTHER_NAMESPACE else namespace
            _, common = self._nearest(request, within)
            saved_tokens = min(common, len(request.prompt) - 1) - found.cached_tokens
        if saved_tokens < _MIN_SAVED_TOKENS:
            change, saved_tokens = None, 0  # the rest is another text
        for part_place, tokens in request.part_tokens(found.cached_tokens):
            self._parts[_part_of(part_place)] += tokens
        self._lookups.append(
            LookupReport(
                line=request.line,
                prompt_tokens=len(request.prompt),
                found_tokens=found.cached_tokens,
                reason=found.reason,
                parted_at_tokens=parted_at_tokens,
                part=None if place is None else place.part,
                message_index=None if place is None else place.message_index,
                role=None if place is None else place.role,
                character=None if place is None else place.character,
                tool_index=None if place is None else place.tool_index,
                change=None if change is None else change.kind,
                saved_tokens=saved_tokens,
            )
        )
        if saved_tokens:
            self._note_cause(found.reason, change, request.line, saved_tokens)

    def _nearest(
        self, request: RenderedRequest, namespace: str | None
    ) -> tuple[RenderedRequest | None, int]:
        """Return the earlier request with the longest common beginning, and its tokens; of one namespace, or of any.

        Of several the newest one.
        """
        best, best_tokens = None, 0
        for other_namespace, other in self._earlier:
            if namespace in (None, other_namespace):
                common = common_tokens(request.prompt, other.prompt)
                if common >= best_tokens:
                    best, best_tokens = other, common
        return best, best_tokens

    def _note_cause(
        self, reason: CacheReason, change: Change | None, line: int, saved_tokens: int
    ) -> None:
        key: tuple[object, ...] = (reason,)
        if change is not None:
            key += (change.kind, change.message_index, change.tool_index)
        sums = self._causes.setdefault(key, _CauseSums(change))
        sums.lines.append(line)
        sums.saved_tokens += saved_tokens
        if change is not None and change.characters is not None:
            sums.spans[change.characters] += 1

    def report(self) -> CacheReport:
        """Return the report of what was replayed so far."""
        prompt_tokens = sum(one.prompt_tokens for one in self._lookups)
        found_tokens = sum(one.found_tokens for one in self._lookups)
        causes = [_cause(CacheReason(str(key[0])), sums) for key, sums in self._causes.items()]
        is_stateful = self._shape.costs.is_stateful
        return CacheReport(
            model=self._front.model.model_id,
            cache="state" if is_stateful else "positions",
            prompt_tokens=prompt_tokens,
            found_tokens=found_tokens,
            computed_tokens=prompt_tokens - found_tokens,
            parts=[
                PartCost(part=part, role=role, computed_tokens=tokens)
                for (part, role), tokens in self._parts.most_common()
            ],
            causes=sorted(causes, key=lambda one: -one.saved_tokens),
            lookups=self._lookups,
            skipped=self._skipped,
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        notes = []
        if self._normalised:
            notes.append(
                f"cache.normalise takes texts out of {self._normalised} of the prompts; "
                "messages are counted without those that it takes whole"
            )
        if self._long:
            notes.append(
                f"{self._long} of the prompts have no room in the context of "
                f"{self._front.model.context_tokens:,} tokens: a daemon would refuse them"
            )
        return notes


def _cause(reason: CacheReason, sums: _CauseSums) -> Cause:
    change = sums.change
    characters = next((span for span, _ in sums.spans.most_common(1)), None)
    return Cause(
        reason=reason,
        change=None if change is None else change.kind,
        message_index=None if change is None else change.message_index,
        role=None if change is None else change.role,
        tool_index=None if change is None else change.tool_index,
        characters=characters,
        lines=sums.lines,
        saved_tokens=sums.saved_tokens,
        advice=advice(reason, change),
    )


def _part_of(place: PromptPlace | None) -> tuple[PromptPart | None, str | None]:
    if place is None:
        return None, None
    return place.part, place.role if place.part is PromptPart.MESSAGE else None


def replayed(
    reporter: CacheReporter, requests: Iterable[RecordedConversation | SkippedLine]
) -> CacheReport:
    """Replay all requests; returns the report."""
    for one in requests:
        reporter.add(one)
    return reporter.report()
