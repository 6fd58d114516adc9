"""Room for requests: free memory, joined where it is scattered, and what checkpoints give up for it.

Owns the order of the two, and the look ahead that spares the cache where all of it would not be enough. Does
not know who asks, or why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from denim.cache.lower_tiers import LowerTiers
from denim.cache.node import Node
from denim.cache.prefix_cache import Hit, PrefixCache
from denim.memory.arena import Arena
from denim.memory.compaction import Compactor
from denim.memory.layout import PAGE, SLOT
from denim.scheduler.request import Request


class Room:
    def __init__(
        self,
        arena: Arena,
        compactor: Compactor,
        cache: PrefixCache | None,
        tiers: LowerTiers | None,
    ) -> None:
        self._arena = arena
        self._compactor = compactor
        self._cache = cache
        self._tiers = tiers
        if cache is not None:
            compactor.watch(cache.tree)

    def make(self, need: Mapping[str, int], running: Iterable[Request], keep: Node | None = None) -> bool:
        """Whether `need` can be allocated now; checkpoints go for it, cheapest first, but for `keep`.

        Nothing is evicted where all that the cache holds beside `running` requests would not be enough.
        """
        if self._compactor.make_room(need):
            return True
        if self._cache is None or not self._cache.tree.checkpoints:
            return False
        kept = self._arena.layout.need(keep.end) if keep is not None and not keep.users else {}
        return self.is_enough(Counter(need) + Counter(kept), running) and self._cache.make_room(need, keep)

    def is_enough(self, need: Mapping[str, int], running: Iterable[Request]) -> bool:
        """Whether `need` fits beside `running` requests, and what is landing, in an arena without any
        checkpoint."""
        total = Counter(need) + self._held_by(running)
        if self._tiers is not None:
            total += self._tiers.taken()
        return self._arena.layout.slabs_for(total) <= self._arena.num_slabs

    def give_up(self, hit: Hit) -> bool:
        """Evict what a request was to begin from; False where others have begun from it too."""
        assert self._cache is not None and hit.node is not None
        if hit.node.users:
            return False
        self._cache.evict(hit.node)
        return True

    def _held_by(self, running: Iterable[Request]) -> Counter[str]:
        """Entries that running requests hold whatever is evicted; not more, perhaps a few less, as pages that
        requests share beyond their last common node are left out. O(requests)."""
        pages = slots = 0
        begun: set[Node] = set()
        for request in running:
            reuse = request.reuse
            node = None if reuse is None or reuse.lease is None else reuse.lease.node
            pages += len(request.pages)
            if node is not None:
                pages -= node.end // self._arena.layout.page_size
                begun.add(node)
            slots += 1
        pages += sum(len(node.pages) for node in begun)
        held = {PAGE: max(0, pages), SLOT: slots}
        return Counter({name: n for name, n in held.items() if self._arena.layout.has(name)})
