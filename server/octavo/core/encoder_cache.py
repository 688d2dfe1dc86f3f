"""The encoded images that a device keeps: which are there, who needs them, which go first.

An image is encoded in the step that computes the first of its placeholders that is not in the prefix cache, and kept
until the last one is computed; then until its room is needed, the one used longest ago first. Pure, as the scheduler.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from octavo.core.request import Request
from octavo.interface.images import ImageItem


class NoImages:
    """The hooks of `EncoderCacheManager` for a model that reads no images."""

    def check(self, items: list[ImageItem], most_in_step: int) -> None:
        """Raise ValueError for any image."""
        if items:
            raise ValueError("the model reads no images here; send text alone")

    def begin_step(self, decodes: bool = False) -> None:
        """There is nothing to release."""

    def cut(self, request: Request, num_new: int) -> int:
        """Cut nothing."""
        return num_new

    def use(self, request: Request, until: int) -> None:
        """Do nothing: there is nothing to hold."""

    def drop(self, request: Request) -> None:
        """There is nothing to release."""

    def forget(self, request: Request) -> None:
        """There is nothing to forget."""

    def take(self) -> tuple[list[ImageItem], list[str]]:
        """Encode and free nothing."""
        return [], []

    def check_integrity(self, running: set[str]) -> None:
        """Check nothing: there are no books."""


class EncoderCacheManager:
    """Images by digest. What is `cut` to fit can be `use`d; nothing is taken before."""

    def __init__(self, budget: int, beside_decodes: int | None = None) -> None:
        """``budget``: embeddings that the device keeps at most. ``beside_decodes``: images that a step encodes at most
        while others wait for their next token (None: any number)."""
        self.budget, self._beside_decodes = budget, beside_decodes
        self._most_in_step: int | None = None
        self._cached: dict[str, int] = {}  # digest -> embeddings; those of the step that is being made, too
        self._holders: Counter[str] = Counter()  # digest -> images of running sequences
        self._held: dict[str, dict[int, str]] = {}  # req_id -> number of the image -> digest
        self._sizes: dict[str, int] = {}  # of what is held
        self._num_cached = self._num_held = 0  # embeddings
        self._idle: OrderedDict[str, None] = OrderedDict()  # cached and not held, the one used longest ago first
        self._to_encode: dict[str, ImageItem] = {}
        self._to_free: list[str] = []
        self._passed: list[tuple[str, int]] = []  # images that the step computes to their end

    def check(self, items: list[ImageItem], most_in_step: int) -> None:
        """Raise ValueError for an image that could never be encoded, or never be computed in one step of
        ``most_in_step`` tokens if it has to."""
        for item in items:
            if item.num_embeds > self.budget:
                raise ValueError(
                    f"an image of {item.num_embeds} embeddings is larger than the encoder cache of {self.budget}; "
                    "send a smaller one"
                )
            if item.whole and len(item.is_embed) > most_in_step:
                raise ValueError(
                    f"an image of {len(item.is_embed)} tokens must be computed in one step, which has room for "
                    f"{most_in_step}; raise max_num_batched_tokens"
                )

    def begin_step(self, decodes: bool = False) -> None:
        """Release the images that the step before, now on its way, computes to their end. ``decodes``: sequences
        past their prompts run."""
        self._most_in_step = self._beside_decodes if decodes else None
        for req_id, number in self._passed:
            held = self._held.get(req_id, {})
            if number in held:
                self._release(held.pop(number))
        self._passed.clear()

    def cut(self, request: Request, num_new: int) -> int:
        """Cut the next ``num_new`` tokens to those that can be computed now, with the room that there is."""
        start = request.num_computed_tokens
        total, mine = self._num_held, set[str]()
        new = set(self._to_encode)
        for item in request.mm_items:
            if item.end <= start:
                continue
            if item.offset >= start + num_new:
                break
            if item.whole and item.end > start + num_new:
                return max(item.offset - start, 0)
            if item.digest not in self._sizes and item.digest not in mine:
                mine.add(item.digest)
                total += item.num_embeds
                if total > self.budget:
                    return max(item.offset - start, 0)
            if item.digest not in self._cached and item.digest not in new:
                new.add(item.digest)
                if self._most_in_step is not None and len(new) > self._most_in_step:
                    return max(item.offset - start, 0)
        return num_new

    def use(self, request: Request, until: int) -> None:
        """Hold the images of the sequence's tokens up to ``until``, which the step computes."""
        start = request.num_computed_tokens
        for number, item in enumerate(request.mm_items):
            if item.end <= start:
                continue
            if item.offset >= until:
                break
            held = self._held.setdefault(request.req_id, {})
            if number not in held:
                held[number] = item.digest
                self._holders[item.digest] += 1
                if item.digest not in self._sizes:
                    self._sizes[item.digest] = item.num_embeds
                    self._num_held += item.num_embeds
                self._idle.pop(item.digest, None)
            if item.digest not in self._cached:
                self._cached[item.digest] = item.num_embeds
                self._num_cached += item.num_embeds
                self._to_encode[item.digest] = item
            if item.end <= until:
                self._passed.append((request.req_id, number))
        while self._num_cached > self.budget:
            self._evict(next(iter(self._idle)))

    def drop(self, request: Request) -> None:
        """Release the images of a sequence that has ended or lost its place."""
        for digest in self._held.pop(request.req_id, {}).values():
            self._release(digest)

    def forget(self, request: Request) -> None:
        """Evict the images of a sequence whose step has failed: they may not be there."""
        for item in request.mm_items:
            if item.digest in self._cached:
                self._evict(item.digest)

    def take(self) -> tuple[list[ImageItem], list[str]]:
        """Take the images that the step encodes, and the digests that it frees before."""
        encode, free = list(self._to_encode.values()), self._to_free
        self._to_encode, self._to_free = {}, []
        return encode, free

    def _release(self, digest: str) -> None:
        self._holders[digest] -= 1
        if not self._holders[digest]:
            del self._holders[digest]
            self._num_held -= self._sizes.pop(digest)
            if digest in self._cached:
                self._idle[digest] = None

    def _evict(self, digest: str) -> None:
        self._num_cached -= self._cached.pop(digest)
        self._idle.pop(digest, None)
        if self._to_encode.pop(digest, None) is None:
            self._to_free.append(digest)

    def check_integrity(self, running: set[str]) -> None:
        """Raise AssertionError when books disagree. ``running``: sequences, by req_id."""
        assert sum(self._cached.values()) == self._num_cached <= self.budget, "more is cached than there is room for"
        assert sum(self._sizes.values()) == self._num_held <= self.budget, "more is held than there is room for"
        holders = Counter(digest for held in self._held.values() for digest in held.values())
        assert holders == self._holders, "images are held by nobody, or not by those who need them"
        assert {req_id for req_id, held in self._held.items() if held} <= running, (
            "held for a sequence that does not run"
        )
        assert self._sizes.keys() == holders.keys()
        assert self._idle.keys() == self._cached.keys() - holders.keys(), "what is idle is cached and not held"
        assert self._to_encode.keys() <= self._cached.keys()
