"""Every command: what it does, and what it refuses with exit status 2 and one line."""

import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests import tiny

import layerflow as lf
from layerflow import tables
from layerflow.cli import cli, main
from layerflow.data.options import CollectOptions

ROOT = Path(__file__).parents[1]


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command line in this process; returns its exit status, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["layerflow", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny.write_lines(tmp_path_factory.mktemp("corpus") / "text.txt", tiny.make_documents(40))


@pytest.fixture(scope="module")
def flow(tmp_path_factory):
    """A run of synthetic trajectories, large enough to analyse."""
    rng = np.random.default_rng(0)
    states = [rng.standard_normal((300, 12)) * np.geomspace(3, 0.3, 12)]
    for _ in range(2):
        matrix = rng.standard_normal((12, 12)) * 0.1
        states.append(states[-1] + states[-1] @ matrix + rng.standard_normal((300, 12)) * 0.1)
    return lf.Trajectories.from_arrays(np.stack(states)).save(tmp_path_factory.mktemp("flow"))


SHORT = ("--max-tokens", "48")
COLLECT = ("--max-tokens", 48, "--samples", 200)
ANALYSE = ("--widths", "2,3", "--seeds", "0", "--k", 8, "--resamples", 50)


def test_collect_analyse_report(command, model, corpus, tmp_path):
    out = tmp_path / "run"
    assert command("collect", "--model", model, "--corpus", corpus, "--out", out, *COLLECT)[0] == 0
    status, shown, _ = command("analyse", out, *ANALYSE)
    assert status == 0
    assert "Quadratic over affine" in shown
    assert "noise floor, 5–5 occurrences" in shown
    status, shown, _ = command("report", out)
    assert status == 0
    assert str(out / "report.html") in shown
    for view in ("results", "results-without-sinks"):
        found = tables.read(out / view)
        assert {"law_scores", "law_contests", "locality", "basis", "noise_floor", "norms"} <= set(found)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["model"]["name"] == str(model)
    assert manifest["options"]["max_tokens"] == 48


def test_run_is_the_three_in_one(command, model, corpus, tmp_path):
    out = tmp_path / "run"
    status, shown, _ = command("run", "--model", model, "--corpus", corpus, "--out", out, *COLLECT, *ANALYSE)
    assert status == 0
    assert (out / "report.html").stat().st_size > 10_000
    assert list((out / "figures").glob("*.svg"))
    assert "page:" in shown
    again = (out / "results" / "law_scores.csv").read_bytes()
    assert command("run", "--model", model, "--corpus", corpus, "--out", out, *COLLECT, *ANALYSE)[0] == 0
    assert (out / "results" / "law_scores.csv").read_bytes() == again


def test_quick_reads_fewer_documents_and_says_so(command, model, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("layerflow.cli.QUICK_DOCUMENTS", 20)
    out = tmp_path / "run"
    assert command("run", "--quick", "--model", model, "--corpus", corpus, "--out", out, *COLLECT, *ANALYSE)[0] == 0
    assert json.loads((out / "manifest.json").read_text())["options"]["max_documents"] == 20
    page = (out / "report.html").read_text()
    assert "20 documents" in page
    assert "A first look" in page


def test_shards_merge_into_one_run(command, model, corpus, tmp_path):
    base = ("collect", "--model", model, "--corpus", corpus, *COLLECT)
    assert command(*base, "--out", tmp_path / "whole")[0] == 0
    for index in (1, 2):
        assert command(*base, "--shard", f"{index}/2", "--out", tmp_path / str(index))[0] == 0
    assert command("merge", tmp_path / "2", tmp_path / "1", "--out", tmp_path / "merged")[0] == 0
    whole, merged = (lf.Trajectories.load(tmp_path / name) for name in ("whole", "merged"))
    np.testing.assert_array_equal(merged.counts, whole.counts)
    np.testing.assert_allclose(merged.states, whole.states, rtol=1e-6, atol=1e-6 * np.abs(whole.states).max())


def test_doctor_checks_a_model(command, model):
    status, shown, _ = command("doctor", "--model", model, "--device", "cpu")
    assert status == 0
    for words in ("numpy", "threads", "cache:", "planted quadratic", "devices:", "probe:", "tokens a second"):
        assert words in shown


def test_doctor_without_a_model(command):
    status, shown, _ = command("doctor", "--no-model")
    assert status == 0
    assert "probe" not in shown


def bad_inputs():
    collect = ("collect", "--model", "MODEL", "--corpus", "CORPUS", "--out", "OUT")
    return {
        "no command": (("bogus",), "No such command"),
        "no option": (("analyse", "FLOW", "--bogus"), "No such option"),
        "no model": (("collect", "--model", "TMP/none", "--corpus", "CORPUS", "--out", "OUT"), "none"),
        "folder that is no model": (("collect", "--model", "TMP", "--corpus", "CORPUS", "--out", "OUT"), "TMP"),
        "truncated gguf": (
            ("collect", "--model", "TMP/short.gguf", "--corpus", "CORPUS", "--out", "OUT"),
            "short.gguf",
        ),
        "no corpus": (("collect", "--model", "MODEL", "--corpus", "TMP/none.txt", "--out", "OUT"), "none.txt"),
        "empty corpus": (("collect", "--model", "MODEL", "--corpus", "TMP/empty.txt", "--out", "OUT"), "empty.txt"),
        "binary corpus": (("collect", "--model", "MODEL", "--corpus", "TMP/binary.txt", "--out", "OUT"), "binary.txt"),
        "no text field": (("collect", "--model", "MODEL", "--corpus", "TMP/no.jsonl", *SHORT, "--out", "OUT"), "title"),
        "broken json": (
            ("collect", "--model", "MODEL", "--corpus", "TMP/broken.jsonl", *SHORT, "--out", "OUT"),
            "line 2",
        ),
        "truncated parquet": (
            ("collect", "--model", "MODEL", "--corpus", "TMP/t.parquet", "--out", "OUT"),
            "t.parquet",
        ),
        "short rows": (("collect", "--model", "MODEL", "--corpus", "TMP/short.txt", *SHORT, "--out", "OUT"), "400"),
        "count nobody reaches": ((*collect, "--max-tokens", "48", "--min-count", "1000000"), "--min-count 1000000"),
        "rows beyond the context": ((*collect, "--max-tokens", "65"), "--max-tokens 65"),
        "no such device": ((*collect, "--max-tokens", "48", "--device", "abacus"), "--device abacus"),
        "no such precision": ((*collect, "--dtype", "float8"), "float8"),
        "documents": ((*collect, "--max-documents", "many"), "--max-documents 'many'"),
        "shard": ((*collect, "--shard", "3/2"), "--shard 3/2"),
        "out is full": (("collect", "--model", "MODEL", "--corpus", "CORPUS", *SHORT, "--out", "TMP"), "TMP"),
        "no run": (("analyse", "TMP"), "is not a run"),
        "k": (("analyse", "FLOW", "--k", "1000"), "--k 1000"),
        "width": (("analyse", "FLOW", "--widths", "8,16"), "--widths 16"),
        "options of a run are refused before it collects": (("run", "--k", "0", "--out", "OUT"), "--k 0"),
        "widths are no numbers": (("analyse", "FLOW", "--widths", "a"), "'a'"),
        "budget": (("analyse", "FLOW", "--budget", "1000000"), "--budget 1000000"),
        "truncated run": (("analyse", "CUT"), "states.safetensors"),
        "report before analysis": (("report", "FLOW"), "layerflow analyse"),
        "merge of no shards": (("merge", "FLOW", "--out", "OUT"), "FLOW"),
    }


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_input_gets_one_line_and_leaves_nothing(case, command, model, corpus, flow, tmp_path):
    given = tmp_path / "given"
    given.mkdir()
    (given / "short.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (given / "empty.txt").write_text("")
    (given / "binary.txt").write_bytes(bytes(range(256)) * 10)
    (given / "short.txt").write_text("too short\n" * 10)
    (given / "no.jsonl").write_text('{"title": "a", "author": "b"}\n')
    (given / "broken.jsonl").write_text('{"text": "' + "a" * 500 + '"}\n{"text": \n')
    pq.write_table(pa.table({"text": ["a" * 500]}), given / "t.parquet")
    (given / "t.parquet").write_bytes((given / "t.parquet").read_bytes()[:-20])
    cut = tmp_path / "cut"
    shutil.copytree(flow, cut)
    states = cut / "trajectories" / "states.safetensors"
    states.write_bytes(states.read_bytes()[:-100])
    places = {"MODEL": model, "CORPUS": corpus, "FLOW": flow, "CUT": cut, "TMP": given, "OUT": tmp_path / "out"}

    def filled(text):
        for name, place in places.items():
            text = text.replace(name, str(place))
        return text

    arguments, words = bad_inputs()[case]
    before = sorted(given.rglob("*")) + sorted(flow.rglob("*"))
    status, _, err = command(*map(filled, arguments))
    assert status == 2, err
    lines = err.strip().splitlines()
    assert len(lines) == 1 or arguments[0] == "collect", err  # a collection reports what it reads on the way
    assert lines[-1].startswith("layerflow: ")
    assert filled(words) in lines[-1]
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
    assert sorted(given.rglob("*")) + sorted(flow.rglob("*")) == before


def test_no_command_shows_the_help(command):
    status, _, err = command()
    assert status == 2
    assert "Commands:" in err
    assert len(err.splitlines()) > 10


def test_help_needs_neither_torch_nor_scikit_learn():
    code = (
        "import sys; sys.argv = ['layerflow', '--help']\n"
        "from layerflow.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_analysis_needs_no_torch(flow):
    code = (
        "import sys, layerflow as lf\n"
        f"lf.analyse(lf.Trajectories.load({str(flow)!r}), lf.StudyOptions(widths=(4,), seeds=(0,), k=8))\n"
        "assert not {'torch', 'transformers', 'datasets', 'gensim'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_and_option_is_explained(name):
    assert cli.commands[name].help
    for option in cli.commands[name].params:
        assert getattr(option, "help", None) or option.param_type_name == "argument" or option.name == "out"


def test_the_defaults_are_the_collectors_own():
    own = {field.name: field.default for field in dataclasses.fields(CollectOptions)}
    shown = {option.name: option.default for option in cli.commands["collect"].params if option.name in own}
    assert own == shown | {"max_documents": None}


def test_the_reference_is_what_the_commands_say():
    spec = importlib.util.spec_from_file_location("make_cli", ROOT / "docs" / "make_cli.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "cli.md").read_text() == module.reference(), "run `python docs/make_cli.py > docs/cli.md`"
