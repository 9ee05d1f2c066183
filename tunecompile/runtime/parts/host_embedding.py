"""`optimize(host_embedding=True)`: frozen embedding tables in pinned host memory."""

from __future__ import annotations

from tunecompile.notes import Note
from tunecompile.runtime.memory.host_embedding import HostEmbeddings
from tunecompile.runtime.model_state import ModelCall, Part, State


class HostEmbedding(Part):
    """Takes the tables as soon as the model is on a GPU."""

    def __init__(self) -> None:
        self.tables: HostEmbeddings | None = None

    def attach(self, state: State) -> None:
        if state.settings.host_embedding:
            self.tables = HostEmbeddings()
            self._take(state)

    def before_step(self, state: State, call: ModelCall) -> None:
        """The model may come to its GPU after `optimize`."""
        self._take(state)

    def _take(self, state: State) -> None:
        if self.tables is not None and self.tables.pending:
            self.tables.take(state.model)

    def notes(self, state: State) -> list[Note]:
        return self.tables.report_notes() if self.tables is not None else []

    def detach(self, state: State) -> None:
        if self.tables is not None:
            self.tables.give_back()
