"""Where each rank stands: in which replica, in which stage of its layers, and which share of each layer it has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """A rank's coordinates, each from 0."""

    data: int
    stage: int
    share: int


@dataclass(frozen=True)
class RankLayout:
    """Ranks are numbered so that those which share a layer, and talk most, are neighbours.

    tensor: ranks that share each layer. pipeline: stages that the layers are divided into. data: replicas.
    """

    tensor: int
    pipeline: int = 1
    data: int = 1

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def result_rank(self) -> int:
        """Of a replica's ranks, counted from its first: the one that tells what a step has sampled."""
        return (self.pipeline - 1) * self.tensor

    def place(self, rank: int) -> RankPlace:
        """Raises IndexError for a rank that there is not."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank is {rank}; allowed: 0 to {self.size - 1}")
        rest, share = divmod(rank, self.tensor)
        data, stage = divmod(rest, self.pipeline)
        return RankPlace(data, stage, share)

    def name(self, rank: int) -> str:
        """For people: rank 1 of 4, with what tells it from the others."""
        place = self.place(rank)
        parts = (("replica", place.data, self.data), ("stage", place.stage, self.pipeline))
        told = [f"{what} {index} of {count}" for what, index, count in parts if count > 1]
        return f"rank {rank} of {self.size}" + (f" ({', '.join(told)})" if told else "")
