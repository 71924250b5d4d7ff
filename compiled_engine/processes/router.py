"""Choose a replica for each request.

The chosen replica is the one estimated to finish the request first. A replica's pending work is counted in prompt
tokens. It is the sum, over the replica's requests, of the prompt tokens not known to be cached and of the expected
output tokens; an output token counts as several prompt tokens. The part of the new prompt that is not cached on the
replica is added. So a prompt goes where its prefix was computed, until another replica has so much less work that
recomputing the prefix there is cheaper. Then both replicas have the prefix.

Weighing cached blocks against load, from the router's own history, follows the routers of SGLang (Zheng et al., 2024,
arXiv:2312.07104) and NVIDIA Dynamo, and Preble (Srivatsa et al., 2024, arXiv:2407.00023).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from compiled_engine.engine.block_pool import hash_blocks
from compiled_engine.engine.messages import EngineRequest


class PrefixHistory:
    """Hashes of the last `capacity` blocks sent to a replica, whose prefix cache evicts in nearly the same order.

    Adding a sequence makes its blocks the newest, with the first block the newest of all: without the first block, a
    sequence's other blocks cannot be found.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a sequence are in the history. hashes: those of its blocks, in order."""
        known = self._hashes
        return next((index for index, block_hash in enumerate(hashes) if block_hash not in known), len(hashes))

    def add(self, hashes: Sequence[bytes]) -> None:
        """Make the blocks of a sequence that is sent to the replica the newest. The oldest blocks are dropped.

        hashes: those of the sequence's blocks, in order.
        """
        known = self._hashes
        for block_hash in reversed(hashes):
            known[block_hash] = None
            known.move_to_end(block_hash)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()


# Cost of generating a token in a large batch, in prompt tokens.
GENERATED = 4
# Expected output length: the first estimate, and the weight of each finished request in its moving average.
FIRST_GUESS, CHANGE = 256.0, 1 / 32
MOST_HASHES = 1 << 18


@dataclass(slots=True, eq=False)
class Route:
    """The replica chosen for a request, and the work that the request adds to the replica's load."""

    replica: int
    work: float  # added to the replica, in prompt tokens
    hashes: list[bytes]  # of the prompt's full blocks


@dataclass(slots=True, eq=False)
class _Load:
    prefixes: PrefixHistory
    num_requests: int = 0
    work: float = 0.0
    last: int = 0  # number of the newest choice of this replica


@dataclass(eq=False)
class Router:
    """Chooses replicas. It knows only which requests were sent to each replica."""

    num_replicas: int
    most_requests: int  # most requests of a replica at a time
    block_size: int
    num_blocks: int  # of a replica's KV cache; 0: no prefix caching
    _loads: dict[int, _Load] = field(init=False)
    _answer: float = FIRST_GUESS
    _choices: int = 0

    def __post_init__(self) -> None:
        capacity = min(self.num_blocks, MOST_HASHES)
        self._loads = {number: _Load(PrefixHistory(capacity)) for number in range(self.num_replicas)}

    def route(self, request: EngineRequest) -> Route | None:
        """Choose a replica and add the request to its load. Returns None if every replica has `most_requests`."""
        loads = {number: load for number, load in self._loads.items() if load.num_requests < self.most_requests}
        if not loads:
            return None
        token_ids = (*request.prompt_token_ids, *request.output_token_ids)
        hashes: list[bytes] = []
        if self.num_blocks and request.sampling_params.prompt_logprobs is None:  # prompt logprobs need the whole prompt
            hash_blocks(hashes, request.prefix_root, token_ids, self.block_size, contents=request.contents)
        missing = {
            number: len(token_ids) - self.block_size * load.prefixes.num_known(hashes) for number, load in loads.items()
        }

        def order(number: int) -> tuple[float, int, int]:
            load = loads[number]
            return load.work + missing[number], load.num_requests, load.last

        chosen = min(loads, key=order)
        load, work = loads[chosen], missing[chosen] + GENERATED * self._expected(request)
        self._choices += 1
        load.last = self._choices
        load.num_requests += 1
        load.work += work
        load.prefixes.add(hashes)
        return Route(chosen, work, hashes)

    def end(self, route: Route, request: EngineRequest, output_token_ids: Sequence[int], *, finished: bool) -> None:
        """Remove a request that has ended from its replica's load, and add the blocks of its output to the history.

        route: the result of `route` for the request. finished: the output is complete, so its length updates the
        estimate of output lengths.
        """
        load = self._loads[route.replica]
        load.num_requests -= 1
        load.work = load.work - route.work if load.num_requests else 0.0
        if finished:
            self._answer += (len(output_token_ids) - self._answer) * CHANGE
        if route.hashes:  # the next prompt of a conversation contains this output
            token_ids = (*request.prompt_token_ids, *output_token_ids)
            hash_blocks(route.hashes, request.prefix_root, token_ids, self.block_size, contents=request.contents)
            load.prefixes.add(route.hashes)

    def remove(self, replica: int) -> None:
        """Remove a replica that has ended, and forget the requests that were sent to it."""
        del self._loads[replica]

    def forget_prefixes(self) -> None:
        for load in self._loads.values():
            load.prefixes.clear()

    def _expected(self, request: EngineRequest) -> float:
        """Return the estimated number of tokens that the request still has to generate."""
        params = request.sampling_params
        longest = params.max_tokens or 0
        expected = longest if params.ignore_eos else min(longest, self._answer)
        return max(0.0, expected - len(request.output_token_ids))
