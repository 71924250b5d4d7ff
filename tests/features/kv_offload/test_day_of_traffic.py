"""Requests about shared documents, a few of them far more often than the rest, which the KV cache cannot all hold."""

from __future__ import annotations

import random
from pathlib import Path

from lagging_copies import NUM_RANKS, LaggingCopies
from simulated_engine import SimulatedEngine

from compiled_engine.features.kv_offload.file_index import FileIndex
from compiled_engine.features.kv_offload.plan import HostBlocks
from compiled_engine.sampling.params import SamplingParams

SIZE, NUM_BLOCKS = 4, 64
DOCUMENT_LEN = 32
NUM_DOCUMENTS = 5 * NUM_BLOCKS * SIZE // DOCUMENT_LEN  # five times what the KV cache holds
NUM_REQUESTS = 600


def hit_rate(num_slots: int, files: Path | None = None) -> float:
    """Return the part of prompt tokens that were cached, with documents chosen by Zipf's law."""
    rng = random.Random(7)
    documents = [[rng.randrange(11) for _ in range(DOCUMENT_LEN)] for _ in range(NUM_DOCUMENTS)]
    weights = [1 / (rank + 1) for rank in range(NUM_DOCUMENTS)]
    copies = LaggingCopies(random.Random(7))
    index = None if files is None else FileIndex(files / "model", 10 * NUM_BLOCKS, NUM_RANKS, most_bytes=1 << 30)
    blocks = [HostBlocks(num_slots, copies.call, index, least_tokens=8, together=1)] if num_slots else []
    engine = SimulatedEngine(
        block_size=SIZE,
        num_blocks=NUM_BLOCKS,
        budget=64,
        max_num_seqs=4,
        max_model_len=64,
        steps_in_flight=2,
        further=blocks,
        copies=copies if blocks else None,
    )
    for number in range(NUM_REQUESTS):
        prompt = rng.choices(documents, weights)[0] + [rng.randrange(11) for _ in range(4)]
        engine.add(f"r{number}", prompt, params=SamplingParams(max_tokens=rng.choice([1, 6]), ignore_eos=True))
        for _ in range(rng.choice([1, 2, 3])):
            engine.step()
    engine.run()
    for each in blocks:
        each.close()
    metrics = engine.scheduler.metrics()
    return float(metrics["prefix_hits"] / metrics["prefix_queries"])


def test_tiers_find_what_the_kv_cache_has_lost(tmp_path: Path) -> None:
    alone, small, large = (hit_rate(num_slots) for num_slots in (0, 2 * NUM_BLOCKS, 6 * NUM_BLOCKS))
    with_files = hit_rate(2 * NUM_BLOCKS, tmp_path)
    print(f"hit rates: {alone:.3f} alone, {small:.3f} and {large:.3f} with host memory, {with_files:.3f} with files")
    most = (NUM_REQUESTS - NUM_DOCUMENTS) / NUM_REQUESTS * DOCUMENT_LEN / (DOCUMENT_LEN + 4)
    assert alone + 0.1 < small < large - 0.05
    assert 0.85 * most < large <= most
    assert 0.85 * most < with_files <= most
