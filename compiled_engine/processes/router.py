"""The choice of a replica for each request.

The chosen replica would finish the request first, by estimate: its work ahead is what its requests still need, in
prompt tokens not known to be cached, and generated tokens, each of which counts as several prompt tokens; the uncached
part of the request's own prompt is added. So a prompt goes where its beginning was computed, until that replica has so
much more work than another that computing the beginning again there takes less; then both have it.

Weighing cached blocks against load, from the router's own history, follows the routers of SGLang (Zheng et al., 2024,
arXiv:2312.07104) and NVIDIA Dynamo, and Preble (Srivatsa et al., 2024, arXiv:2407.00023).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from compiled_engine.core.block_pool import hash_blocks
from compiled_engine.messages import EngineRequest


class PrefixHistory:
    """The hashes of the `capacity` blocks that were sent last; a prefix cache evicts in nearly the same order.

    Looking blocks up makes them the newest, the first of a sequence last: without the first the others are not found.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """Return how many of a sequence's first blocks are known."""
        known = self._hashes
        return next((index for index, block_hash in enumerate(hashes) if block_hash not in known), len(hashes))

    def add(self, hashes: Sequence[bytes]) -> None:
        """The blocks of a sequence were sent there."""
        known = self._hashes
        for block_hash in reversed(hashes):
            known[block_hash] = None
            known.move_to_end(block_hash)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()


# The cost of generating a token in a large batch, in prompt tokens.
GENERATED = 4
# How long an answer is taken to be before there was one, and how much each changes that.
FIRST_GUESS, CHANGE = 256.0, 1 / 32
MOST_HASHES = 1 << 18


@dataclass(slots=True, eq=False)
class Route:
    """The replica of a request. work: what it adds there, in prompt tokens. hashes: of its prompt's full blocks."""

    replica: int
    work: float
    hashes: list[bytes]


@dataclass(slots=True, eq=False)
class _Load:
    """last: the number of the choice that fell on it last."""

    prefixes: PrefixHistory
    num_requests: int = 0
    work: float = 0.0
    last: int = 0


@dataclass(eq=False)
class Router:
    """Chooses replicas from the requests sent to each, without other knowledge of them.

    most_requests: the most that a replica gets at a time. num_blocks: of its KV cache; 0 if no prefixes are shared.
    """

    num_replicas: int
    most_requests: int
    block_size: int
    num_blocks: int
    _loads: dict[int, _Load] = field(init=False)
    _answer: float = FIRST_GUESS
    _choices: int = 0

    def __post_init__(self) -> None:
        capacity = min(self.num_blocks, MOST_HASHES)
        self._loads = {number: _Load(PrefixHistory(capacity)) for number in range(self.num_replicas)}

    def route(self, request: EngineRequest) -> Route | None:
        """Choose a replica, and count the request there; None while all have as many as they may."""
        loads = {number: load for number, load in self._loads.items() if load.num_requests < self.most_requests}
        if not loads:
            return None
        token_ids = (*request.prompt_token_ids, *request.output_token_ids)
        hashes: list[bytes] = []
        if self.num_blocks and request.sampling_params.prompt_logprobs is None:  # those compute all of the prompt
            hash_blocks(hashes, request.prefix_root, token_ids, self.block_size)
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
        """Remove a request. finished: by itself, so that its length informs the estimate of output lengths."""
        load = self._loads[route.replica]
        load.num_requests -= 1
        load.work = load.work - route.work if load.num_requests else 0.0
        if finished:
            self._answer += (len(output_token_ids) - self._answer) * CHANGE
        if route.hashes:  # the next prompt of a conversation has the answer in it
            token_ids = (*request.prompt_token_ids, *output_token_ids)
            hash_blocks(route.hashes, request.prefix_root, token_ids, self.block_size)
            load.prefixes.add(route.hashes)

    def remove(self, replica: int) -> None:
        """Remove a replica that has ended, with everything sent to it."""
        del self._loads[replica]

    def forget_prefixes(self) -> None:
        for load in self._loads.values():
            load.prefixes.clear()

    def _expected(self, request: EngineRequest) -> float:
        """Tokens that are still to be generated."""
        params = request.sampling_params
        longest = params.max_tokens or 0
        expected = longest if params.ignore_eos else min(longest, self._answer)
        return max(0.0, expected - len(request.output_token_ids))
