"""A process's place among those that answer requests at one socket."""

from __future__ import annotations

from compiled_engine.server.shared_figures import SharedFigures


class Place:
    """What the processes of a server know of each other, in columns of their figures: who serves, and how many
    connections each has. To be made first of all that reserves columns."""

    def __init__(self, figures: SharedFigures) -> None:
        self._figures = figures
        self._serving = figures.reserve(1)
        self._connections = figures.reserve(1)

    def serve(self) -> None:
        """This process takes connections from now on."""
        self._figures.own[self._serving] = 1

    def serves(self, number: int) -> bool:
        return bool(self._figures.of(number, self._serving))

    def count(self, change: int) -> None:
        """So many connections of this process have begun, or ended."""
        self._figures.own[self._connections] += change

    def has_most(self) -> bool:
        """Whether another process that serves has fewer connections than this one."""
        others = zip(self._figures.of_others(self._serving), self._figures.of_others(self._connections), strict=True)
        own = self._figures.own[self._connections]
        return any(serves and connections < own for serves, connections in others)

    def forget(self, number: int) -> None:
        """A process has ended."""
        for column in (self._serving, self._connections):
            self._figures.forget(number, column)
