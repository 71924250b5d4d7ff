"""The KV cache manager: gives requests their blocks and other resources, and shares the blocks of common prefixes.

Only full blocks are shared. A block can be found once the step that fills it is scheduled and its tokens are known.
Requests admitted to that same step (copies of one prompt, for example) only find blocks filled by chunks longer than a
decode. The reason is that a step with such a chunk writes K and V of all tokens before any query attends, whereas a
step of decodes may write and attend in one kernel, in any order of requests. A block completed by a decode, or by a
chunk as short as one, can therefore be found only from the next step on; `Scheduler.schedule` keeps this rule.

Blocks are released at once, although steps in flight may still write to them. This is safe. Steps run in the order in
which they were scheduled, so the next request that holds a block writes later, and reads only its own writes. If a
block is registered, all its tokens are known, so a write in flight to it writes the K and V that its hash stands for.
Unknown tokens come after all registered blocks of their request; if the request ends before they are known, their block
is never registered.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from itertools import cycle

from compiled_engine.engine.block_pool import BlockGroup
from compiled_engine.engine.cache_resource import CacheResource, FindableResource
from compiled_engine.engine.messages import NO_CACHE
from compiled_engine.engine.request import Request

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids by KV group."""


class KVCacheManager:
    """Gives a request its part of every resource, or of none. The resources are the KV groups and `others`.

    `others` are taken first, because taking blocks may evict cached blocks. Only blocks are added to a running request
    later. A prefix counts as cached only if every resource has it.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        others: Sequence[CacheResource] = (),
        *,
        enable_prefix_caching: bool,
    ) -> None:
        self.groups = tuple(groups)
        self.resources: tuple[CacheResource, ...] = (*others, *self.groups)
        of_others = (each for each in others if isinstance(each, FindableResource))
        self._findable: tuple[FindableResource, ...] = (*self.groups, *of_others)
        self.enable_prefix_caching = enable_prefix_caching
        # Kind of the resource without room for the last request that `admit` refused; None once another was admitted.
        self.lacking: str | None = None
        # Prompt tokens that were looked up in the prefix cache, and found, when requests were first admitted.
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._is_first = True  # whether the last `admit` was its request's first

    @property
    def num_slots(self) -> int:
        """The number of tokens that the cache can hold if one request has all blocks.

        Without KV groups it is NO_CACHE, a number larger than any request needs.
        """
        return min((group.num_slots for group in self.groups), default=NO_CACHE)

    @property
    def num_blocks(self) -> int:
        return sum(group.pool.num_blocks for group in self.groups)

    @property
    def num_free_blocks(self) -> int:
        return sum(group.pool.num_free for group in self.groups)

    def admit(self, request: Request, reserve: int) -> bool:
        """Give a request its part of every resource, for all its known tokens, and return True.

        The blocks of a cached prefix are shared, and `num_computed_tokens` is set to the prefix's length; at least one
        token remains to be computed. Returns False, without changes, if a resource has no room, or if fewer than
        `reserve` blocks of a group would stay free.
        """
        num_tokens = len(request.token_ids)
        reads_prefix = self.enable_prefix_caching and not request.computes_every_token
        num_cached = self._common_prefix(request, num_tokens - 1) if reads_prefix else 0
        for resource in self.resources:  # no comprehensions here: a step may admit many requests
            if not resource.has_room(request, num_tokens, num_cached, reserve):
                self.lacking = resource.kind
                return False
        self.lacking = None
        for resource in self.resources:
            resource.take(request, num_tokens, num_cached)
        request.num_computed_tokens = num_cached
        request.num_slots = request.next_block_end = sys.maxsize
        for group in self.groups:
            request.num_slots = min(request.num_slots, group.slots_of(request))
            if self.enable_prefix_caching:
                request.next_block_end = min(request.next_block_end, num_cached + group.block_size)
        self._is_first = request.num_cached_tokens is None
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            if reads_prefix:
                self.prefix_queries += request.num_prompt_tokens
                self.prefix_hits += request.num_cached_tokens
        return True

    def cancel(self, request: Request) -> None:
        """Undo the last `admit`, which must have admitted this request: release its parts, and restore the counts."""
        if self._is_first:
            if self.enable_prefix_caching and not request.computes_every_token:
                self.prefix_queries -= request.num_prompt_tokens
                self.prefix_hits -= request.num_cached_tokens or 0
            request.num_cached_tokens = None
        self.free(request)

    def allocate(self, request: Request, num_tokens: int) -> BlockIds | None:
        """Give a running request the blocks that it lacks for `num_tokens` more tokens. Returns their ids by KV group.

        Returns () if it has enough blocks, and None, without changes, if a group has too few free blocks.
        """
        end = request.num_computed_tokens + num_tokens
        if end <= request.num_slots:
            return ()
        for group in self.groups:
            if not group.can_grow(request, end):
                return None
        blocks: BlockIds = ()
        request.num_slots = sys.maxsize
        for group in self.groups:
            blocks += (group.grow(request, end),)
            request.num_slots = min(request.num_slots, group.slots_of(request))
        return blocks

    def block_ids(self, request: Request) -> BlockIds:
        return tuple(tuple(group.block_ids(request)) for group in self.groups)

    def register(self, request: Request) -> None:
        """Add the request's blocks that are full of known tokens to the prefix cache.

        The tokens must be computed or scheduled. Does nothing for a request that holds no blocks, since `free` has set
        its `num_computed_tokens` to 0.
        """
        num_tokens = min(request.num_computed_tokens, len(request.token_ids))
        if num_tokens < request.next_block_end:
            return
        next_block_end = sys.maxsize
        for group in self.groups:
            next_block_end = min(next_block_end, group.register(request, num_tokens))
        request.next_block_end = next_block_end

    def take_registered(self) -> list[list[int]]:
        """Return the places added to the prefix cache since the last call, in a list for each FindableResource.

        The KV groups come first; their places are blocks. Steps in flight may still have to fill these places.
        """
        return [findable.take_registered() for findable in self._findable]

    def unregister(self, registered: Sequence[Sequence[int]]) -> None:
        """Remove places that were not written from the prefix cache. registered: a result of `take_registered`."""
        for findable, places in zip(self._findable, registered, strict=True):
            findable.unregister(places)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Requests keep their blocks."""
        for findable in self._findable:
            findable.unregister_all()

    def keep_apart(self, request: Request) -> None:
        """Add no more blocks of a running request to the prefix cache until the request is admitted again."""
        request.next_block_end, request.step_ends = sys.maxsize, ()

    def free(self, request: Request) -> None:
        """Release everything that the request holds. Raises RuntimeError if it holds nothing.

        Sets `num_computed_tokens` to 0, because a preempted request is computed again. As a result, `register` adds no
        block of the request when its tokens in flight arrive.
        """
        for resource in self.resources:
            resource.free(request)
        request.num_slots = request.num_computed_tokens = 0

    def check_all_free(self) -> None:
        """Raise RuntimeError if a part of any resource is held. Call it when no request is left."""
        for resource in self.resources:
            resource.check_all_free()

    def check_integrity(self, holders: Collection[Request]) -> None:
        """Raise RuntimeError unless exactly `holders` hold a part of each resource, and resources are consistent."""
        for resource in self.resources:
            resource.check_integrity(holders)

    def _common_prefix(self, request: Request, most: int) -> int:
        """Return the length of the longest prefix, of at most `most` tokens, that all resources have cached."""
        found, num_agreeing = most, 0
        for resource in cycle(self.resources):
            shorter = resource.longest_prefix(request, found)
            num_agreeing = num_agreeing + 1 if shorter == found else 1
            found = shorter
            if num_agreeing == len(self.resources):
                break
        return found
