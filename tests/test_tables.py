from dataclasses import dataclass

import pyarrow as pa
import pyarrow.csv
import pytest

from layerflow import tables
from layerflow.errors import InputError


@dataclass(frozen=True)
class Fact:
    state: int
    value: float | None
    name: str
    holds: bool


ROWS = [Fact(0, 0.1, "=1+1", True), Fact(1, None, 'a "quoted", text\n', False)]


def test_columns_are_the_records_fields():
    table = tables.from_records(Fact, ROWS)
    assert table.column_names == ["state", "value", "name", "holds"]
    assert table.schema.types == [pa.int64(), pa.float64(), pa.string(), pa.bool_()]
    assert table.to_pylist()[1] == {"state": 1, "value": None, "name": 'a "quoted", text\n', "holds": False}


def test_no_rows_still_have_columns():
    assert tables.from_records(Fact, []).column_names == ["state", "value", "name", "holds"]


def test_both_files_hold_the_same_rows(tmp_path):
    table = tables.from_records(Fact, ROWS)
    tables.write(tmp_path / "results", {"facts": table})
    assert tables.read(tmp_path / "results")["facts"].equals(table)
    assert pa.csv.read_csv(
        tmp_path / "results" / "facts.csv", parse_options=pa.csv.ParseOptions(newlines_in_values=True)
    ).equals(table)
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["facts.csv", "facts.parquet"]


def test_tables_of_an_earlier_analysis_are_removed(tmp_path):
    table = tables.from_records(Fact, ROWS)
    tables.write(tmp_path / "results", {"facts": table, "others": table})
    tables.write(tmp_path / "results", {"facts": table})
    assert set(tables.read(tmp_path / "results")) == {"facts"}
    tables.write(tmp_path / "results", {})
    assert not (tmp_path / "results").exists()


def test_a_failed_write_leaves_the_old_tables_and_nothing_half_written(tmp_path, monkeypatch):
    table = tables.from_records(Fact, ROWS)
    tables.write(tmp_path, {"facts": table, "others": table})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(table, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(pa.parquet, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        tables.write(tmp_path, {"facts": table.slice(1)})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_damaged_table_is_named(tmp_path):
    (tmp_path / "facts.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match=r"facts\.parquet is not a readable Parquet table"):
        tables.read(tmp_path)
