"""What the engine and its server are both given, to tell what HTTP costs."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine.bench.workloads import LARGEST_TOKEN_ID, request_lengths

# Of the measured mixed steps.
STEPS = 16


@dataclass(frozen=True)
class HttpWorkload:
    """num_requests with prompts and outputs of `least` to `most` tokens each, all there at the start. vocab_size: token
    ids are below it. mixed_*: a mixed step, as in the table, against which the time between tokens is held."""

    num_requests: int
    least: int
    most: int
    vocab_size: int
    temperature: float
    mixed_decodes: int
    mixed_context: int
    mixed_prompt: int
    seed: int = 0

    def requests(self, shift: int) -> tuple[list[list[int]], list[int]]:
        """Prompts and output lengths; with each `shift` other ids of the same lengths, so that nothing is cached."""
        bounds = (self.least, self.most)
        prompts, lengths = request_lengths(self.num_requests, bounds, bounds, self.seed)
        return [[(token + shift) % self.vocab_size for token in prompt] for prompt in prompts], lengths


# Workload T of the table, and the mixed step of 32 decodes and 1,024 tokens.
ON_GPU = HttpWorkload(256, 100, 1024, LARGEST_TOKEN_ID + 1, 0.6, 32, 128, 1024)
# The bundled model's, where a processor is all there is.
ON_CPU = HttpWorkload(32, 16, 64, 4096, 0.6, 8, 32, 64)
