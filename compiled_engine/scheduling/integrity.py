"""What must hold of the scheduler's requests and blocks between any two calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from compiled_engine.scheduling.block_pool import BlockPool
from compiled_engine.scheduling.request import Request, RequestStatus


def check_all_free(pool: BlockPool) -> None:
    """Raise RuntimeError if a block is held, though no request is left to hold it."""
    if pool.num_free != pool.num_blocks:
        raise RuntimeError(f"no request is left, but only {pool.num_free} of {pool.num_blocks} blocks are free")


def check_requests(requests: Collection[Request], running: Sequence[Request], num_waiting: int) -> None:
    """Raise RuntimeError unless those that run are in order, and every request runs, waits or awaits its last token,
    and knows how far it is plain."""
    if [request.order for request in running] != sorted({request.order for request in running}):
        raise RuntimeError(f"running requests are not in order: {[request.request_id for request in running]}")
    ending = sum(request.status is RequestStatus.ENDING for request in requests)
    if len(running) + num_waiting + ending != len(requests):
        raise RuntimeError(
            f"{len(requests)} requests are known, but {len(running)} run, {num_waiting} wait "
            f"and {ending} await their last token"
        )
    for request in requests:
        if (request.plain_until_computed, request.plain_until_known) != request.plain_limits():
            raise RuntimeError(
                f"request {request.request_id!r} is taken for plain until "
                f"{(request.plain_until_computed, request.plain_until_known)}, but is until {request.plain_limits()}"
            )
