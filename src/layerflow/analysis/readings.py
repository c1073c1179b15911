"""How the paper's claims are read off a run's tables: one function a claim, for `claims`.

A reading raises KeyError where a table is missing, and UntestableError where its rows cannot tell.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from layerflow.query import by_transition, distinct, where, working_width
from layerflow.tables import Results


class UntestableError(ValueError):
    """The tables are there, but say nothing to a claim."""


@dataclass(frozen=True)
class Reading:
    """What one view of a run says to a claim."""

    measured: str
    holds: bool


def _scores(results: Results, law: str, noise: str, metric: str, width: int | None = None) -> dict[int, float]:
    """A law's score by transition, averaged over seeds, at one width (the working one by default)."""
    table = results["law_scores"]
    width = working_width(table) if width is None else width
    found = by_transition(where(table, law=law, noise=noise, n_components=width), metric)
    if not found:
        raise UntestableError(f"no scores of {law} with {noise} noise at width {width}")
    return found


def _margins(
    results: Results, law: tuple[str, str], opponent: tuple[str, str], metric: str, width: int | None = None
) -> dict[int, float]:
    ours, theirs = _scores(results, *law, metric, width), _scores(results, *opponent, metric, width)
    return {transition: ours[transition] - theirs[transition] for transition in ours}


def _wins(margins: Mapping[int, float]) -> int:
    return sum(margin > 0 for margin in margins.values())


def _count(margins: Mapping[int, float], unit: str = "") -> str:
    low, high = min(margins.values()), max(margins.values())
    return f"{_wins(margins)} of {len(margins)} ({low:+.3g} to {high:+.3g}{unit})"


def _reaches(margins: Mapping[int, float], share: float) -> bool:
    return _wins(margins) >= share * len(margins) - 1


def _median(values: Iterable[float]) -> float:
    found = list(values)
    if not found:
        raise UntestableError("it has no rows")
    return median(found)


def _span(values: Mapping[int, float]) -> str:
    if not values:
        raise UntestableError("it has no rows")
    return f"{min(values.values()):.2f} to {max(values.values()):.2f}"


KM, KM_FULL = ("km", "local_diagonal"), ("km", "local_full")
AFFINE, AFFINE_FULL = ("affine", "diagonal"), ("affine", "full")
QUADRATIC = ("quadratic", "diagonal")
NULL_A, NULL_B, NULL_C = ("null_a", "diagonal"), ("null_b", "diagonal"), ("null_c", "full")


def contest(law: tuple[str, str], opponent: tuple[str, str], metric: str, share: float) -> Callable[[Results], Reading]:
    """Transitions at which a law beats another at the working width, and the range of margins."""

    def read(results: Results) -> Reading:
        margins = _margins(results, law, opponent, metric)
        return Reading(_count(margins, "" if metric == "r2" else " nats"), _reaches(margins, share))

    return read


def quadratic_everywhere(results: Results) -> Reading:
    """The quadratic against the affine map in R², at every width."""
    table = results["law_scores"]
    by_width = {}
    for width in distinct(where(table, law="quadratic"), "n_components"):
        by_width[width] = _margins(results, QUADRATIC, AFFINE, "r2", width)
    working = by_width[working_width(table) or 0]
    shown = ", ".join(f"{_wins(margins)} of {len(margins)} at {width}" for width, margins in by_width.items())
    return Reading(shown, _wins(working) == len(working))


def km_by_width(results: Results) -> Reading:
    """Wins of KM over the affine map in R², by width."""
    table = results["law_scores"]
    widths = distinct(table, "n_components")
    wins = [_wins(_margins(results, KM, AFFINE, "r2", width)) for width in widths]
    if len(widths) < 2:
        raise UntestableError("one width shows no trend")
    shown = ", ".join(f"{count} at {width}" for count, width in zip(wins, widths, strict=True))
    return Reading(shown, wins[-1] < wins[0] and all(b <= a + 1 for a, b in pairwise(wins)))


def km_radius(results: Results) -> Reading:
    """Median radius ratio of KM's neighbourhood, by width."""
    if not results["locality"].num_rows:
        raise UntestableError("there are no neighbourhoods")
    table = where(results["locality"], k=min(distinct(results["locality"], "k")))
    ratios = {
        width: _median(by_transition(where(table, n_components=width), "radius_ratio").values())
        for width in distinct(table, "n_components")
    }
    if len(ratios) < 2:
        raise UntestableError("one width shows no trend")
    values = list(ratios.values())
    shown = ", ".join(f"{ratio:.0%} at {width}" for width, ratio in ratios.items())
    return Reading(shown, all(b > a for a, b in pairwise(values)))


def km_by_k(results: Results) -> Reading:
    """Wins of KM over the affine map in R² at the working width, by k."""
    table = results["locality"]
    width = working_width(table)
    affine = _scores(results, *AFFINE, "r2", width)
    wins = {}
    for k in distinct(table, "k"):
        r2 = by_transition(where(table, n_components=width, k=k), "r2")
        wins[k] = sum(r2[transition] > affine[transition] for transition in r2)
    if len(wins) < 2:
        raise UntestableError("one k shows no trend")
    counts = list(wins.values())
    shown = ", ".join(f"{count} at k = {k}" for k, count in wins.items())
    return Reading(shown, counts[-1] < counts[0] and counts == sorted(counts, reverse=True))


def equal_budget(results: Results) -> Reading:
    """Wins of the quadratic at 64 components with all training tokens and with the equal budget."""
    widest = 64
    full = _wins(_margins(results, QUADRATIC, AFFINE, "r2", widest))
    if full == 0:
        raise UntestableError("the quadratic wins no transition at 64 components that a smaller budget could cost it")
    cut = {"law_scores": results["law_scores_equal_budget"]}
    small = _margins(cut, QUADRATIC, AFFINE, "r2", widest)
    narrow = _margins(cut, QUADRATIC, AFFINE, "r2", 32)
    shown = f"{full} becomes {_wins(small)} of {len(small)} at 64; {_wins(narrow)} at 32"
    return Reading(shown, _wins(small) < full)


def last_margin(results: Results) -> Reading:
    """The quadratic's margin at the last transition, and its wins without it."""
    margins = _margins(results, QUADRATIC, AFFINE, "r2")
    last = max(margins)
    if len(margins) < 2:
        raise UntestableError("one transition has no others beside it")
    others = {transition: margin for transition, margin in margins.items() if transition != last}
    largest = margins[last] >= max(others.values())
    shown = f"margin {margins[last]:+.3f} at the last, {_count(others)} without it"
    return Reading(shown, largest and _wins(others) == len(others))


def _subjects(results: Results, column: str, width: int | None = None) -> tuple[dict[int, float], dict[int, float]]:
    table = results["gradient"]
    width = working_width(table) if width is None else width
    rows = where(table, n_components=width)
    flow, control = (by_transition(where(rows, subject=subject), column) for subject in ("flow", "control"))
    if not flow or not control:
        raise UntestableError(f"no gradient rows at width {width}")
    return flow, control


def alignment_gap(results: Results) -> Reading:
    """Alignment gap of the flow by width, and the control's at the working width."""
    shown, holds = [], True
    for width in distinct(where(results["gradient"], subject="control"), "n_components"):
        flow, control = _subjects(results, "gap", width)
        shown.append(f"{mean(flow.values()):+.3f} ({_span(flow)}) at {width}")
        holds = holds and all(flow[transition] < control[transition] for transition in control)
    if not shown:
        raise UntestableError("no control to compare with")
    floor = _span(_subjects(results, "gap")[1])
    return Reading(f"{'; '.join(shown)}; control {floor}", holds)


def gradient_energy(results: Results) -> Reading:
    """Share of step energy along the density's gradient, and the control's."""
    flow, control = _subjects(results, "energy_share")
    holds = all(flow[transition] < control[transition] for transition in control)
    return Reading(f"{_span(flow)}; control {_span(control)}", holds)


def fitted_diffusion(results: Results) -> Reading:
    """Held-out R² of the best semidefinite diffusion matrix, and its control."""
    table = results["gradient_diffusion"]
    rows = where(table, n_components=working_width(table), constraint="psd")
    flow, control = (by_transition(where(rows, subject=f"{subject}_centred"), "r2") for subject in ("flow", "control"))
    if not control:
        raise UntestableError("no control to compare with")
    holds = all(flow[transition] < control[transition] for transition in control)
    return Reading(f"held-out R² {_span(flow)}; control {_span(control)}", holds)


def _potential(results: Results, column: str) -> dict[int, float]:
    table = results["potential"]
    found = by_transition(where(table, n_components=working_width(table)), column)
    if not found:
        raise UntestableError("no potential")
    return found


def potential_share(results: Results) -> Reading:
    """Share of the quadratic field's R² that a potential explains."""
    shares = _potential(results, "potential_share")
    return Reading(_span(shares), _median(shares.values()) > 0.5)


def rotational_share(results: Results) -> Reading:
    """Share that no potential explains."""
    shares = _potential(results, "rotational_share")
    return Reading(_span(shares), min(shares.values()) > 0.02)


def antisymmetric_recovery(results: Results) -> Reading:
    """Share of the rotational remainder that an antisymmetric matrix recovers, where there is one."""
    potential, field, both = (
        _potential(results, column) for column in ("r2_potential", "r2_quadratic", "r2_potential_antisymmetric")
    )
    recovered = {
        transition: (both[transition] - potential[transition]) / (field[transition] - potential[transition])
        for transition in field
        if field[transition] - potential[transition] > 0.01
    }
    return Reading(f"{_span(recovered)}, median {_median(recovered.values()):.2f}", _median(recovered.values()) > 0.5)


def symmetric_share(results: Results) -> Reading:
    """Symmetric share of the affine drift's matrix, and with steps shuffled."""
    shares, shuffled = _potential(results, "symmetric_share"), _potential(results, "symmetric_share_shuffled")
    above = {transition: shares[transition] - shuffled[transition] for transition in shares}
    return Reading(f"{_span(shares)}; shuffled {_span(shuffled)}", _reaches(above, 1.0))


def symmetric_at_the_end(results: Results) -> Reading:
    """Symmetric share at the last transition, and the largest."""
    shares = _potential(results, "symmetric_share")
    last = max(shares)
    return Reading(
        f"{shares[last]:.2f} at the last, {max(shares.values()):.2f} at most", shares[last] == max(shares.values())
    )


def rank_kept(observable: str, judge: Callable[[float], bool]) -> Callable[[Results], Reading]:
    """Spearman correlation of an observable at the last state with itself at state 0."""

    def read(results: Results) -> Reading:
        rows = where(results["conserved"], observable=observable)
        if not rows.num_rows:
            raise UntestableError(f"there is no {observable}")
        last = max(distinct(rows, "state"))
        value = where(rows, state=last)["from_first"][0].as_py()
        if value is None:
            raise UntestableError(f"{observable} does not vary")
        return Reading(f"{value:+.2f}", judge(value))

    return read


def noise_floor_falls(results: Results) -> Reading:
    """Noise floor in the three bands of frequency."""
    ratios = [row["ratio"] for row in results["noise_floor"].to_pylist()]
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        raise UntestableError("no band holds a token")
    shown = " / ".join("–" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
    return Reading(shown, known == sorted(known, reverse=True))


def _spreads(results: Results, law: str, noise: str) -> dict[int, float]:
    rows = where(results["rollout"], law=law, noise=noise)
    by_state: dict[int, list[float]] = {}
    for row in rows.to_pylist():
        if row["spread_ratio"] is not None:
            by_state.setdefault(row["state"], []).append(row["spread_ratio"])
    if not by_state:
        raise UntestableError(f"no rollout of {law}")
    return {state: mean(values) for state, values in by_state.items()}


def rollout_shrinks(results: Results) -> Reading:
    """Spread of KM's rollouts at three states, averaged over seeds."""
    spreads = _spreads(results, "km", "local_diagonal")
    last = max(spreads)
    middle = spreads[last // 2]
    shown = f"{middle:.2f} mid-network, {spreads[last - 1]:.2f} at the last raw state, {spreads[last]:.2f} at the last"
    return Reading(shown, middle < 1 and spreads[last - 1] < 1 and spreads[last] < 1)


def inflates(law: str, noise: str) -> Callable[[Results], Reading]:
    """Spread of a control's rollouts at the last state."""

    def read(results: Results) -> Reading:
        spreads = _spreads(results, law, noise)
        return Reading(f"{spreads[max(spreads)]:.2f}", spreads[max(spreads)] > 1)

    return read


def nonaffine(results: Results) -> Reading:
    """Non-affine shares of means and individual states, medians over transitions."""
    table = results["affinity"]
    shown, state = [], {}
    for kind in ("mean", "individual"):
        rows = where(table, kind=kind)
        step, state[kind] = by_transition(rows, "nonaffine_step"), by_transition(rows, "nonaffine_state")
        gain = by_transition(rows, "nonlinear_gain")
        medians = (_median(values.values()) for values in (state[kind], step, gain))
        shown.append("{}: state {:.1%}, step {:.1%}, gain {:.1%}".format(kind, *medians))
    return Reading("; ".join(shown), _median(state["mean"].values()) < _median(state["individual"].values()))
