"""The KV cache of an engine: blocks in use, and blocks that are free but still hold what was computed.

As vLLM does it: freed blocks keep their content until they are given to someone else, oldest first, and of one
request its last block first. So a request that comes back finds the beginning of what it had.
"""

from __future__ import annotations

#: Whose blocks: a request's own by its number (>= 0), those of a common beginning by -1 - its number.
Owner = int


class Blocks:
    """Counts of blocks. `total` as vLLM counts: one block of the cache is its null block."""

    def __init__(self, kv_blocks: int, block_size: int, caching: bool) -> None:
        self.size, self.total, self.free = block_size, kv_blocks - 1, kv_blocks - 1
        self._caching = caching
        #: Free blocks that hold something, by owner, the oldest first.
        self._kept: dict[Owner, int] = {}
        self._kept_total = 0
        #: Common beginnings in use: owner -> [blocks, requests that use them].
        self._shared: dict[Owner, list[int]] = {}

    @property
    def usage(self) -> float:
        return 1.0 - self.free / self.total

    def take(self, count: int) -> None:
        """Use `count` of the free blocks; what they held is lost."""
        self.free -= count
        over = self._kept_total - self.free
        while over > 0:
            owner = next(iter(self._kept))
            kept = self._kept[owner]
            if kept > over:
                self._kept[owner] = kept - over
                self._kept_total -= over
                return
            del self._kept[owner]
            self._kept_total -= kept
            over -= kept

    def give_back(self, owner: Owner, count: int, full: int) -> None:
        """Free `count` blocks, of which the first `full` hold whole blocks of the owner's tokens."""
        self.free += count
        if self._caching and full > 0:
            self._kept[owner] = full
            self._kept_total += full

    def found(self, owner: Owner) -> int:
        """Free blocks that still hold the beginning of the owner's tokens."""
        return self._kept.get(owner, 0)

    def reuse(self, owner: Owner, count: int) -> None:
        """Use the first `count` blocks that were found; the rest stays free and is forgotten."""
        kept = self._kept.pop(owner)
        self._kept_total -= kept
        self.free -= count

    # -- common beginnings ---------------------------------------------------------------------

    def shared(self, prefix: int) -> int:
        """Blocks of a common beginning that are there, in use or free."""
        inuse = self._shared.get(-1 - prefix)
        return inuse[0] if inuse else self.found(-1 - prefix)

    def shared_is_free(self, prefix: int) -> bool:
        return -1 - prefix not in self._shared

    def share(self, prefix: int, count: int) -> None:
        """One more request uses the first `count` blocks of a common beginning that is there."""
        owner = -1 - prefix
        inuse = self._shared.get(owner)
        if inuse:
            inuse[1] += 1
            return
        self.reuse(owner, count)
        self._shared[owner] = [count, 1]

    def lend(self, prefix: int, had: int, count: int) -> bool:
        """Make the common beginning, of which a request shares the first `had` blocks, out of its own: all `count`.

        False where others have made more of it meanwhile than the request shares; then it keeps its own copy.
        """
        owner = -1 - prefix
        inuse = self._shared.get(owner)
        if not self._caching or (inuse[0] if inuse else self.found(owner)) >= count:
            return False
        if inuse:
            if inuse[0] != had:
                return False
            inuse[0] = count
        else:
            self._kept_total -= self._kept.pop(owner, 0)
            self._shared[owner] = [count, 1]
        return True

    def unshare(self, prefix: int) -> None:
        owner = -1 - prefix
        inuse = self._shared[owner]
        inuse[1] -= 1
        if not inuse[1]:
            del self._shared[owner]
            self.give_back(owner, inuse[0], inuse[0])
