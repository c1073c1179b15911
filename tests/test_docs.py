"""What README and docs say is true: commands, links, code, tables."""

import re
from pathlib import Path

import numpy as np
import pytest

import layerflow as lf
from layerflow.cli import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def fenced(path, language=""):
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_readmes_first_two_blocks_set_up_run_and_test():
    first, second = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[:2]
    assert first.count("\n") == second.count("\n") == 1
    assert first.rstrip().endswith("layerflow run --out runs/first")
    assert second.rstrip().endswith("-m pytest")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page):
    for line in re.findall(r"^(?:.*&& )?(?:\.venv/bin/)?layerflow (\w+.*)$", "\n".join(fenced(page)), re.MULTILINE):
        if line.startswith("[") or page.name == "cli.md":
            continue
        name, *words = line.split()
        known = {option for param in cli.commands[name].params for option in param.opts}
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= known, line


def test_the_laws_page_runs():
    (code,) = fenced(ROOT / "docs" / "laws.md", "python")
    exec(compile(code, "laws.md", "exec"), {})


def test_the_readmes_python_runs(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    states = np.cumsum(rng.standard_normal((3, 400, 20)), axis=0)
    lf.Trajectories.from_arrays(states).save(tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    (code,) = fenced(ROOT / "README.md", "python")
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["z"].shape == (3, 400, 16)
    assert "law_scores" in names["tables"]


def test_every_table_and_column_is_explained():
    rng = np.random.default_rng(0)
    states = np.cumsum(rng.standard_normal((3, 200, 12)), axis=0).astype(np.float32)
    halves = (states[-1], states[-1])
    flow = lf.Trajectories.from_arrays(
        states, counts=np.full(200, 9), halves=halves, samples={"states": states, "row": np.arange(200)}
    )
    page = (ROOT / "docs" / "tables.md").read_text()
    for name, table in lf.analyse(flow, lf.StudyOptions(widths=(4,), seeds=(0,), k=8, n_resamples=10)).items():
        assert f"**{name}**" in page, name
        for column in table.column_names:
            assert re.search(rf"\b{column}\b", page), f"{name}.{column}"


def test_every_public_name_is_documented():
    for name in lf.__all__:
        assert getattr(lf, name).__doc__, name
        assert dir(lf).count(name) == 1
