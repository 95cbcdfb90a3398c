import json
import math
import subprocess
import sys

import pytest
from geodescent.experiments.results import (
    ResultsError,
    ResultsStore,
    cell_key,
    latest,
    settings_hash,
    to_json,
)


def test_what_is_appended_is_read_back(tmp_path, make_record):
    records = [make_record(seed=0), make_record("frozen", 1)]
    with ResultsStore(tmp_path / "modular") as store:
        for record in records:
            store.append(record)
        assert store.records() == records
    lines = (tmp_path / "modular" / "cells.jsonl").read_text().splitlines()
    assert [json.loads(line)["arm"] for line in lines] == ["adamw", "frozen"]


def test_non_finite_numbers_are_stored_as_null(tmp_path, make_record):
    with ResultsStore(tmp_path) as store:
        store.append(make_record(metrics={"capped_fraction": math.nan, "loss": math.inf}))
        metrics = store.records()[0]["metrics"]
    assert metrics["capped_fraction"] is None
    assert metrics["loss"] is None


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="object"):
        to_json({"a": object()})


@pytest.mark.parametrize("cut", [1, 40, -2])
def test_a_torn_last_line_is_ignored_then_set_aside(tmp_path, make_record, cut):
    with ResultsStore(tmp_path) as store:
        store.append(make_record(seed=0))
    whole = store.path.read_bytes()
    torn = whole[:cut]
    store.path.write_bytes(whole + torn)

    assert [record["seed"] for record in store.records()] == [0]
    assert store.path.read_bytes() == whole + torn  # reading changes nothing
    with ResultsStore(tmp_path) as store:
        store.append(make_record(seed=1))
    assert [record["seed"] for record in store.records()] == [0, 1]
    assert all(json.loads(line) for line in store.path.read_bytes().splitlines())
    assert store.path.with_name("cells.jsonl.torn").read_bytes() == torn + b"\n"  # nothing is thrown away


def test_a_last_line_that_lacks_only_its_newline_counts(tmp_path, make_record):
    with ResultsStore(tmp_path) as store:
        store.append(make_record(seed=0))
        store.path.write_bytes(store.path.read_bytes().removesuffix(b"\n"))
        assert len(store.records()) == 1
        store.append(make_record(seed=1))
        assert [record["seed"] for record in store.records()] == [0, 1]
    assert not list(tmp_path.glob("*.torn"))


@pytest.mark.parametrize(
    "line", [b'{"study": "modular", "arm"', b"\xff\xfe", b"[1]", b'{"study": "modular"}', b"", b"null"]
)
def test_other_damage_names_file_and_line_and_touches_nothing(tmp_path, make_record, line):
    with ResultsStore(tmp_path) as store:
        store.append(make_record(seed=0))
        good = store.path.read_bytes()
        damaged = good + line + b"\n" + good
        store.path.write_bytes(damaged)
        with pytest.raises(ResultsError, match=r"cells\.jsonl, line 2"):
            store.records()
    assert store.path.read_bytes() == damaged


@pytest.mark.parametrize("change", [{"status": "fine"}, {"seed": "first"}])
def test_a_wrong_field_is_damage(tmp_path, make_record, change):
    with ResultsStore(tmp_path) as store, pytest.raises(ResultsError, match=next(iter(change))):
        store.append(make_record(**change))
    assert not store.path.exists()


def test_a_second_process_is_turned_away(tmp_path):
    code = (
        "import sys; from geodescent.experiments.results import *\n"
        "try:\n    ResultsStore(sys.argv[1]).__enter__()\nexcept ResultsError as error:\n    print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with ResultsStore(tmp_path):
        other = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "in use" in other.stdout
    assert str(tmp_path) in other.stdout
    after = subprocess.run(command, capture_output=True, text=True, check=True)
    assert after.stdout == ""


def test_append_needs_the_lock(tmp_path, make_record):
    with pytest.raises(ResultsError, match="lock"):
        ResultsStore(tmp_path).append(make_record())


def test_a_file_in_the_way_of_the_folder(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(ResultsError, match="in the way"):
        ResultsStore(tmp_path / "results").__enter__()


def test_the_hash_knows_settings_and_not_their_order():
    one = settings_hash({"a": 1, "b": (0.9, 0.98)})
    assert one == settings_hash({"b": [0.9, 0.98], "a": 1})
    assert one != settings_hash({"a": 2, "b": [0.9, 0.98]})
    assert len(one) == 12


def test_latest_keeps_the_last_line_of_a_cell(make_record):
    first, again, other = make_record(status="failed"), make_record(), make_record(seed=1)
    assert list(latest([first, other, again]).values()) == [again, other]
    assert cell_key(first) == ("modular", "adamw", 0, 1e-3, "0" * 12)
