"""The headline as a small table for the terminal."""

from collections.abc import Mapping

from layerflow.query import distinct, working_width
from layerflow.report.headline import CONTESTS, outcome
from layerflow.report.text import number
from layerflow.tables import Results


def headline(views: Mapping[str, Results]) -> list[str]:
    """Lines that say who beats whom at how many transitions, with the medians, and the noise floor, for every view."""
    names = list(views)
    lines = [("", names), *((title, [cells.get(name, "") for name in names]) for title, cells in _rows(views))]
    first = max(len(title) for title, _ in lines)
    widths = [max(len(cells[index]) for _, cells in lines) for index in range(len(names))]
    return [
        f"{title:<{first}}" + "".join(f"   {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for title, cells in lines
    ]


def _rows(views: Mapping[str, Results]) -> list[tuple[str, dict[str, str]]]:
    """Titles, each with its cell in every view that has one."""
    rows: dict[str, dict[str, str]] = {}
    for name, results in views.items():
        scores = results["law_scores"]
        width = working_width(scores)
        found = [outcome(results, contest, width) for contest in CONTESTS] if width is not None else []
        for each in found:
            if each is not None:
                unit = "R²" if each.contest.metric == "r2" else "nats"
                title = f"{each.contest.name}, {unit}, d = {each.n_components}"
                medians = f"{number(each.median)} / {number(each.opponent_median)}"
                rows.setdefault(title, {})[name] = f"{each.wins} of {each.n_transitions}   {medians}"
        for each_width in distinct(scores, "n_components"):
            quadratic = outcome(results, CONTESTS[0], each_width)
            if quadratic is not None and each_width != width:
                title = f"{CONTESTS[0].name}, R², d = {each_width}"
                medians = f"{number(quadratic.median)} / {number(quadratic.opponent_median)}"
                rows.setdefault(title, {})[name] = f"{quadratic.wins} of {quadratic.n_transitions}   {medians}"
        for band in results["noise_floor"].to_pylist() if "noise_floor" in results else []:
            high = "" if band["high"] is None else band["high"]
            title = f"noise floor, {band['low']}–{high} occurrences"
            rows.setdefault(title, {})[name] = f"{number(band['ratio'])} ({band['n_tokens']:,} tokens)"
    return list(rows.items())
