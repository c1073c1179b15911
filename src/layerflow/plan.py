"""What a study is asked for, and what that comes to with the data at hand."""

from dataclasses import dataclass

from layerflow.analysis.gradient import N_NEIGHBORS
from layerflow.analysis.scoring import Split, split
from layerflow.data.trajectories import Trajectories
from layerflow.errors import InputError
from layerflow.progress import say

WIDTHS = (8, 16, 32, 64)
WORKING_WIDTH = 16
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
    """

    widths: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    k: int = 64
    budget: int | None = None
    n_resamples: int = 1000
    basis_tokens: int = 8000
    random_state: int = 0


@dataclass(frozen=True)
class Plan:
    """Options made definite by the data at hand.

    ``n_neighbors`` nearest tokens are searched for once, wide enough to hold the k training neighbours of nearly every
    token of any split; local density is read off the ``density_neighbor``-th.
    """

    widths: tuple[int, ...]
    working_width: int
    splits: tuple[Split, ...]
    k: int
    k_sweep: tuple[int, ...]
    n_neighbors: int
    density_neighbor: int
    budget: int

    @classmethod
    def of(cls, trajectories: Trajectories, options: StudyOptions) -> "Plan":
        """Check options against the data.

        Raises:
            InputError: A width, k, budget or seed that the data do not allow.
        """
        n_tokens, width = trajectories.n_tokens, trajectories.width
        if not options.seeds:
            raise InputError("no seeds given; at least one split is needed, for example --seeds 0")
        if min(options.seeds) < 0 or len(set(options.seeds)) < len(options.seeds):
            raise InputError(
                f"--seeds {','.join(map(str, options.seeds))} must be different whole numbers, none below 0"
            )
        if options.n_resamples < 1:
            raise InputError(f"{options.n_resamples} bootstrap resamples asked for; give at least 1")
        splits = tuple(split(n_tokens, seed) for seed in options.seeds)
        n_train = len(splits[0].train)
        if not 1 <= options.k <= n_train:
            raise InputError(
                f"--k {options.k} must lie between 1 and the {n_train} training tokens; choose a smaller k"
            )
        widths = _widths(options.widths, width, n_train)
        budget = min(PAPER_BUDGET, n_train // 2) if options.budget is None else options.budget
        if not 2 <= budget <= n_train:
            raise InputError(f"--budget {budget} must lie between 2 and the {n_train} training tokens")
        sweep = tuple(size for size in K_SWEEP if size <= n_train)
        if sweep != K_SWEEP:
            say(f"locality: k above {n_train} is left out, there are no more training tokens")
        return cls(
            widths=widths,
            working_width=min(widths, key=lambda each: abs(each - WORKING_WIDTH)),
            splits=splits,
            k=options.k,
            k_sweep=sweep,
            n_neighbors=min(n_tokens - 1, max(options.k + options.k // 2 + 14, N_NEIGHBORS)),
            density_neighbor=min(n_tokens - 1, N_NEIGHBORS),
            budget=budget,
        )


def _widths(asked: tuple[int, ...] | None, width: int, n_train: int) -> tuple[int, ...]:
    limit = min(width, n_train - 2)
    if asked is None:
        widths = tuple(each for each in WIDTHS if each <= limit) or (limit,)
        if widths != WIDTHS:
            say(
                f"widths: {', '.join(map(str, widths))}; "
                f"states of width {width} and {n_train} training tokens allow no more"
            )
        return widths
    bad = [each for each in asked if not 1 <= each <= limit]
    if bad or not asked:
        raise InputError(
            f"--widths {','.join(map(str, bad or asked))} must lie between 1 and {limit}, "
            f"for states of width {width} and {n_train} training tokens"
        )
    return tuple(sorted(set(asked)))
