"""What a study is asked for, and what that comes to with the data at hand."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from layerflow.analysis.gradient import N_NEIGHBORS
from layerflow.analysis.scoring import Split, split
from layerflow.data.trajectories import Trajectories
from layerflow.errors import InputError
from layerflow.query import nearest_width

WIDTHS = (8, 16, 32, 64)
K_SWEEP = (64, 256, 1024)
PAPER_BUDGET = 9549


@dataclass(frozen=True)
class StudyOptions:
    """What to compute, and how.

    Args:
        widths: Numbers of components; those of 8, 16, 32, 64 that the data allow when None.
        seeds: Seeds of the 80/20 splits.
        k: Neighbours of the Kramers–Moyal law.
        budget: Training tokens of the equal-budget block, on the first split; the smaller of 9,549 and half of them
            when None.
        n_resamples: Bootstrap resamples behind every interval.
        basis_tokens: Tokens in the sample the shared basis is fitted on.
        random_state: Seed of everything random but the splits.

    Raises:
        InputError: An option that no data could allow.
    """

    widths: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    k: int = 64
    budget: int | None = None
    n_resamples: int = 1000
    basis_tokens: int = 8000
    random_state: int = 0

    def __post_init__(self) -> None:
        for option, value, rule in (
            ("--widths", self.widths, self.widths is None or (self.widths and min(self.widths) >= 1)),
            ("--seeds", self.seeds, self.seeds and min(self.seeds) >= 0 and len(set(self.seeds)) == len(self.seeds)),
            ("--k", self.k, self.k >= 1),
            ("--budget", self.budget, self.budget is None or self.budget >= 2),
            ("--resamples", self.n_resamples, self.n_resamples >= 1),
        ):
            if not rule:
                shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
                raise InputError(f"{option} {shown} {_RULES[option]}")


_RULES = {
    "--widths": "must be whole numbers of at least 1, for example 8,16",
    "--seeds": "must be different whole numbers, none below 0, for example 0,1,2",
    "--k": "must be at least 1; 64 is usual",
    "--budget": "must be at least 2 training tokens",
    "--resamples": "must be at least 1; 1000 is usual",
}


@dataclass(frozen=True)
class Plan:
    """Options made definite by the data at hand.

    ``n_neighbors`` nearest tokens are searched for once, wide enough to hold the k training neighbours of nearly every
    token of any split; local density is read off the ``density_neighbor``-th.
    """

    widths: tuple[int, ...]
    splits: tuple[Split, ...]
    k: int
    k_sweep: tuple[int, ...]
    n_neighbors: int
    density_neighbor: int
    budget: int
    notes: tuple[str, ...]

    @property
    def working_width(self) -> int:
        """16, or the width nearest to it."""
        return nearest_width(self.widths)

    @classmethod
    def of(cls, trajectories: Trajectories, options: StudyOptions) -> "Plan":
        """Check options against the data.

        Raises:
            InputError: A width, k or budget that the data do not allow.
        """
        n_tokens = trajectories.n_tokens
        splits = tuple(split(n_tokens, seed) for seed in options.seeds)
        n_train = len(splits[0].train)
        if options.k > n_train:
            raise InputError(
                f"--k {options.k} must lie between 1 and the {n_train} training tokens; choose a smaller k"
            )
        budget = min(PAPER_BUDGET, n_train // 2) if options.budget is None else options.budget
        if budget > n_train:
            raise InputError(f"--budget {budget} must lie between 2 and the {n_train} training tokens")
        widths = _widths(options.widths, min(trajectories.width, n_train - 2), f"{n_train} training tokens")
        sweep = tuple(sorted({options.k, *K_SWEEP}))
        notes = []
        if sweep[-1] > n_train:
            notes.append(f"locality: k above {n_train} is left out, there are no more training tokens")
        if options.widths is None and widths != WIDTHS:
            notes.append(f"widths: {_listed(widths)}; the data allow no more of {_listed(WIDTHS)}")
        return cls(
            widths=widths,
            splits=splits,
            k=options.k,
            k_sweep=tuple(size for size in sweep if size <= n_train),
            n_neighbors=min(n_tokens - 1, max(options.k + options.k // 2 + 14, N_NEIGHBORS)),
            density_neighbor=min(n_tokens - 1, N_NEIGHBORS),
            budget=budget,
            notes=tuple(notes),
        )

    def within(self, n_directions: int, asked: tuple[int, ...] | None) -> "Plan":
        """Keep to the directions in which the states differ at all.

        Raises:
            InputError: A width that was asked for has more components than that.
        """
        if self.widths[-1] <= n_directions:
            return self
        widths = _widths(asked, n_directions, f"{n_directions} directions in which the states differ")
        note = f"widths: {_listed(widths)}; the states differ in {n_directions} directions only"
        return replace(self, widths=widths, notes=(*self.notes, note))


def _widths(asked: tuple[int, ...] | None, limit: int, reason: str) -> tuple[int, ...]:
    if asked is None:
        return tuple(each for each in WIDTHS if each <= limit) or (limit,)
    bad = [each for each in asked if each > limit]
    if bad:
        raise InputError(f"--widths {_listed(bad)} must lie between 1 and {limit}: the data have {reason}")
    return tuple(sorted(set(asked)))


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
