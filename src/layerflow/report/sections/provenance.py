"""Where the numbers come from: model, corpus, options, counts and versions, and what limits them."""

from collections.abc import Mapping
from typing import Any

from layerflow.report.blocks import Facts, Run, Section
from layerflow.report.text import count, visible

# Checked or drawn elsewhere, or too long to read: the manifest itself has them.
_HIDDEN = frozenset(
    {
        "format",
        "format_version",
        "checksums",
        "sha256",
        "norms",
        "norms_without_sinks",
        "first_ids",
        "left_out",
        "shard",
    }
)
_ORDER = ("model", "corpus", "counts", "options", "sinks", "versions")
_LONGEST_LIST = 8


def title(manifest: Mapping[str, Any]) -> str:
    """Name the run: the depth flow of a model, or of trajectories made elsewhere."""
    return f"The depth flow of {_name(manifest.get('model')) or 'these trajectories'}"


def subtitle(run: Run) -> str:
    """Say in one line what the flow was collected from, and how much of it there is."""
    corpus, counts = _name(run.manifest.get("corpus")), run.manifest.get("counts")
    parts = [f"over {corpus}"] if corpus else []
    if isinstance(counts, Mapping):
        for key, noun in (("documents_used", "documents"), ("tokens", "positions of text")):
            if isinstance(counts.get(key), int):
                parts.append(f"{count(counts[key])} {noun}")
    for view, (scores,) in run.having("law_scores"):
        first = scores.slice(0, 1).to_pylist()[0]
        parts.append(f"{count(first['n_train'] + first['n_test'])} trajectories {view.label.lower()}")
    return " · ".join(parts)


def notices(run: Run) -> list[str]:
    """Return what a reader must know before reading a number: quick, partial and damaged runs, a missing view."""
    found = []
    options = run.manifest.get("options")
    options = options if isinstance(options, Mapping) else {}
    limit = options.get("max_documents")
    if options.get("quick") or run.manifest.get("quick"):
        found.append("A first look: --quick read only a part of the corpus, and the numbers move with the rest of it.")
    elif isinstance(limit, int):
        found.append(f"At most {count(limit)} documents were read (--max-documents), not the whole corpus.")
    status = run.manifest.get("status", "complete")
    if status != "complete":
        found.append(
            f"Partial: the collection’s status is “{describe(status)}”; these numbers lack the rest of the corpus."
        )
    left_out = run.manifest.get("left_out")
    if left_out:
        found.append(f"{count(len(left_out))} rows of text gave states that are not finite and were left out.")
    if len(run.views) == 1:
        found.append(
            f"One view only: this run has no results other than “{run.views[0].label.lower()}”, so what depends on "
            "attention sinks cannot be told apart."
        )
    return found


def what_was_run(run: Run) -> Section:
    """List what the manifest says, group by group, but for checksums and long lists."""
    single = tuple(
        (_words(key), describe(value))
        for key, value in run.manifest.items()
        if key not in _HIDDEN and key != "rows" and not isinstance(value, Mapping) and value is not None
    )
    groups = {key: value for key, value in run.manifest.items() if isinstance(value, Mapping) and key not in _HIDDEN}
    order = sorted(groups, key=lambda key: (_ORDER.index(key) if key in _ORDER else len(_ORDER), key))
    listed = [(_words(key), _pairs(groups[key])) for key in order]
    return Section(
        "run",
        "What was run",
        "As the collection recorded it; manifest.json has it in full, with the checksums.",
        (Facts((*listed, ("run", single)) if single else tuple(listed)),),
    )


def describe(value: Any) -> str:
    """Write a manifest's value in one line."""
    if isinstance(value, Mapping):
        return "; ".join(f"{_words(key)} {describe(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, list):
        return ", ".join(map(describe, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return count(value) if isinstance(value, int) and abs(value) >= 1000 else str(value)


def _pairs(group: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    shown = {
        name: value
        for name, value in group.items()
        if value is not None and name not in _HIDDEN and not (isinstance(value, list) and len(value) > _LONGEST_LIST)
    }
    return tuple((_words(name), describe(value)) for name, value in shown.items())


def _name(source: Any) -> str:
    """Name a model or corpus, recorded by its name alone or as a record with one."""
    if isinstance(source, Mapping):
        source = source.get("name")
    return "" if source is None else visible(str(source))


def _words(key: str) -> str:
    return key.replace("_", " ")
