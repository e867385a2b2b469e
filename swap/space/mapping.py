"""Which version of which key is current, which is committed, and which versions somebody still needs.

Owns: the working mapping that puts change and gets see, the committed mapping behind it, and the count of holders of
every version. Must not know: files, transfers, manifests.
Next: `objects` decides when a put takes effect, `commits` when a commit does.

                 put, delete                    commit
    new version ------------> working mapping ----------> committed mapping
                                     ^                        |        |
                                     +-------- abort ---------+        +--> snapshots

A version is freed when nothing holds it any more: neither mapping, no snapshot, no transfer. What a commit writes down
is kept besides, until it is known which state the drive has.

Ctrl-C may come anywhere. So a change is noted before it is made, and a commit takes effect by one assignment.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from swap.space.allocation import Piece, Space


@dataclass(slots=True, eq=False)
class Version:
    """Bytes of a key as of one put.

    Attributes:
        pieces: where they are, in order.
        length: bytes, a multiple of the alignment.
        checksums: per piece a word per granule; () when the store keeps none, or before the put is over.
        holders: mappings, snapshots and transfers that need it.
    """

    pieces: tuple[Piece, ...]
    length: int
    checksums: tuple[bytes, ...] = ()
    holders: int = 0


Changes = dict[Hashable, Version | None]
"""Keys with their new version; None for a key that was deleted."""


class VersionMap:
    """The mappings of one store. Not thread-safe: the store's lock is held around every call."""

    def __init__(self, space: Space, versions: Mapping[Hashable, Version], *, explicit_commit: bool) -> None:
        """Start with committed versions.

        Args:
            space: gets the pieces of a version back that has no holder left.
            versions: by key; they have their pieces already.
            explicit_commit: keep the committed mapping apart; without it every change is committed at once.
        """
        self._space = space
        self._working: dict[Hashable, Version] = {}
        self._committed: dict[Hashable, Version] | None = {} if explicit_commit else None
        self._changed: set[Hashable] = set()
        self._kept: set[Version] = set()  # by a commit under way or in doubt: not freed, although nothing holds them
        self._decided: Changes = {}  # of a commit that has taken effect: what of it the committed mapping may lack
        for mapping in (self._working, self._committed):
            if mapping is not None:
                for key, version in versions.items():
                    self.hold(version)
                    mapping[key] = version

    @property
    def working(self) -> Mapping[Hashable, Version]:
        """What gets see."""
        return self._working

    @property
    def committed(self) -> Mapping[Hashable, Version]:
        """What the last commit left; the working mapping where every change is committed at once."""
        self._catch_up()
        return self._working if self._committed is None else self._committed

    @property
    def changed(self) -> bool:
        """Something was put or deleted since the last commit."""
        return bool(self._changed)

    def uncommitted_keys(self) -> list[Hashable]:
        """Keys with a version that the last commit did not leave."""
        return [key for key in self._changed if key in self._working]

    def hold(self, version: Version) -> None:
        """Keep a version until `release`."""
        version.holders += 1

    def release(self, version: Version) -> None:
        """Undo one `hold`; the last one frees the version."""
        assert version.holders > 0, "a version was released more often than held"
        version.holders -= 1
        if version.holders == 0 and version not in self._kept:
            self._space.free(version.pieces)

    def put(self, key: Hashable, version: Version) -> None:
        """Map `key` to a version. May be repeated after an interrupt."""
        self._note_change(key)
        old = self._working.get(key)
        if old is not version:
            self.hold(version)
            self._working[key] = version
            if old is not None:
                self.release(old)

    def remove(self, key: Hashable) -> None:
        """Forget `key`, which is mapped."""
        self._note_change(key)
        self.release(self._working.pop(key))

    def after(self, changes: Changes) -> dict[Hashable, Version]:
        """What the committed mapping will be when `changes` have taken effect."""
        mapping = dict(self.committed)
        for key, version in changes.items():
            if version is None:
                mapping.pop(key, None)
            else:
                mapping[key] = version
        return mapping

    def begin_commit(self) -> Changes:
        """Return the changes since the last commit and keep their versions; `end_commit` or `let_go` must follow."""
        self._catch_up()
        changes: Changes = {key: self._working.get(key) for key in self._changed}
        self._kept.update({version for version in changes.values() if version is not None})
        return changes

    def end_commit(self, changes: Changes) -> None:
        """Let the changes of a commit take effect in the committed mapping. May be repeated after an interrupt."""
        self._decided = changes
        self.let_go()

    def let_go(self) -> None:
        """Free what a commit has kept, as far as nothing holds it."""
        self._catch_up()
        while self._kept:
            version = self._kept.pop()
            if version.holders == 0:
                self._space.free(version.pieces)

    def abort(self) -> None:
        """Make the working mapping the committed one again."""
        assert self._committed is not None
        self._catch_up()
        for key in self._changed:
            old = self._working.pop(key, None)
            if (version := self._committed.get(key)) is not None:
                self.hold(version)
                self._working[key] = version
            if old is not None:
                self.release(old)
        self._changed = set()

    def snapshot(self, wanted: Mapping[Hashable, Version]) -> dict[Hashable, Version]:
        """Versions that are current or committed, as of now; every one of them is held and must be released."""
        versions = dict(wanted)
        for version in versions.values():
            self.hold(version)
        return versions

    def _note_change(self, key: Hashable) -> None:
        if self._committed is not None:
            self._changed.add(key)

    def _catch_up(self) -> None:
        """Let the committed mapping have what is decided. An interrupt leaves the rest of it to the next call."""
        if not self._decided:
            return
        assert self._committed is not None
        for key, version in self._decided.items():
            old = self._committed.get(key)
            if old is version:
                continue
            if old is not None:
                self._kept.add(old)
            # No calls from here on: an interrupt comes before or behind all of it.
            if version is None:
                del self._committed[key]
            else:
                self._committed[key] = version
                version.holders += 1
            if old is not None:
                old.holders -= 1
        self._changed = {key for key in self._changed if self._working.get(key) is not self._committed.get(key)}
        self._decided = {}
