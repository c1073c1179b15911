"""How much memory a collection will take, said before it starts. Imports torch, through the model."""

from dataclasses import dataclass

from layerflow.data.models import LanguageModel
from layerflow.data.positions import Positions
from layerflow.data.sinks import NormCounts

GIB = 1 << 30

# Python with torch, transformers, pyarrow and a tokenizer in use.
_LIBRARIES = 500 << 20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of memory a collection takes at its peak, by what takes them.

    ``model`` and ``working`` are memory of the device the model is on, the rest is the host's.
    """

    libraries: int
    model: int
    rows: int
    sums: int
    working: int

    @property
    def total(self) -> int:
        """All of it together."""
        return self.libraries + self.model + self.rows + self.sums + self.working

    def __str__(self) -> str:
        """Describe it in one line."""
        parts = ("model", "rows", "sums", "working", "libraries")
        return (
            f"memory at the peak: about {self.total / GIB:.1f} GiB ("
            + ", ".join(f"{part} {getattr(self, part) / GIB:.2f}" for part in parts)
            + ")"
        )


def estimate_memory(model: LanguageModel, positions: Positions, batch_tokens: int) -> MemoryEstimate:
    """Estimate the peak memory of a collection.

    To work in, a batch takes its L+1 states, their sums by token at worst as long again, and what a block holds while
    it runs: some 16 vectors a token, the wide ones of its feed-forward layer among them.
    """
    weights = [*model.backbone.parameters(), *model.backbone.buffers()]
    windows = positions.windows
    slots = len(positions.token_ids) + positions.n_first
    return MemoryEstimate(
        libraries=_LIBRARIES,
        model=sum(weight.numel() * weight.element_size() for weight in weights),
        rows=windows.ids.nbytes + windows.offsets.nbytes + windows.documents.nbytes + positions.counted.nbytes,
        sums=8 * model.width * slots * (model.n_states + 1) + NormCounts.nbytes(model.n_states),
        working=model.dtype.itemsize * model.width * batch_tokens * (2 * model.n_states + 16),
    )
