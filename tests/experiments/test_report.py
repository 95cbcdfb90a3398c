import csv
import html.parser
import os

import numpy as np
import pytest
from geodescent.experiments.plots import Curve, mean_curve, plot_curves
from geodescent.experiments.report import write_report
from geodescent.experiments.studies import ModularStudy
from matplotlib.figure import Figure

HOSTILE = "<script>alert('x')</script>&\"'"


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.images, self.text, self.links = [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag == "a":
            self.links.append(dict(attrs)["href"])

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def study():
    return ModularStudy(steps=8)


@pytest.fixture
def records(make_record):
    steps = {"adamw": (100, 300, None), "frozen": (150, 200, 250), "riemannian-adam": (90, 210, 330)}
    return [
        make_record(arm, seed, metrics={"steps_to_95": value})
        for arm, own in steps.items()
        for seed, value in enumerate(own)
    ]


def test_the_page_is_self_contained_and_says_what_it_must(tmp_path, study, records):
    page_path = write_report(tmp_path / "report", study, records, "geodescent study modular --seeds 3")
    text = page_path.read_text(encoding="utf-8")
    page = Page(text)
    assert page_path == tmp_path / "report" / "index.html"
    assert len(page.images) == 7
    for image in page.images:
        assert image["src"].startswith("data:image/svg+xml;base64,")
        assert len(image["alt"]) > 40
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert text.count("http") == text.count("http-equiv")  # nothing is fetched
    assert all((page_path.parent / link).is_file() for link in page.links)
    for needed in ("geodescent study modular --seeds 3", "torch 2", "a processor", "0, 1, 2", "adamw", "2 of 3"):
        assert needed in page.text
    assert page.text.index("Plots") < page.text.index("Table")


def test_text_from_arms_settings_and_errors_is_escaped(tmp_path, study, make_record):
    hostile = [
        make_record(HOSTILE, 0, versions={"python": HOSTILE}, hardware=HOSTILE),
        make_record(
            "adamw",
            0,
            status="failed",
            metrics={},
            history={},
            error=HOSTILE,
            traceback=HOSTILE,
            config={"groups": None},
        ),
    ]
    text = write_report(tmp_path, study, hostile, f"geodescent --out {HOSTILE}").read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags
    assert "<script" not in text
    assert page.text.count(HOSTILE) >= 6
    assert all("<script" not in image["src"] for image in page.images)


def test_csv_files_hold_the_stored_values(tmp_path, study, records):
    records[0]["history"]["train_loss"] = [2.0, 1 / 3, 1e-17]
    records[0]["history"]["query_condition"] = [1.0, None, 0.1 + 0.2]
    folder = write_report(tmp_path, study, records, "command").parent

    def rows(name):
        with open(folder / name, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    parts = {
        "loss": {"training": "train_loss", "validation": "validation_loss"},
        "accuracy": {"training": "train_accuracy", "validation": "validation_accuracy"},
        "condition": {"Q": "query_condition", "K": "key_condition"},
        "angles": {"Q": "query_angle", "K": "key_angle"},
        "movement": {"Q": "query_movement", "K": "key_movement"},
    }
    for name, keys in parts.items():
        found = {
            (row["arm"], int(row["seed"]), row["part"], float(row["step"])): row[name] for row in rows(f"{name}.csv")
        }
        expected = {
            (record["arm"], record["seed"], part, step): "" if value is None else value
            for record in records
            for part, key in keys.items()
            for step, value in zip(record["history"]["step"], record["history"][key], strict=True)
        }
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == "" if value == "" else float(found[key]) == value

    headline = {(row["arm"], int(row["seed"])): row["steps_to_95"] for row in rows("headline.csv")}
    assert headline["adamw", 2] == ""
    assert float(headline["riemannian-adam", 1]) == 210
    differences = {(row["arm"], int(row["seed"])): float(row["difference_steps"]) for row in rows("differences.csv")}
    assert differences["frozen", 0] == 50
    assert differences["frozen", 2] == 250 - 8  # not reached counts as the last step
    assert [row["arm"] for row in rows("table.csv")] == ["adamw", "frozen", "riemannian-adam"]


def test_the_same_results_give_the_same_page(tmp_path, study, records):
    one, two = (write_report(tmp_path / name, study, records, "c").read_bytes() for name in ("a", "b"))
    assert one == two


def test_a_crash_leaves_the_old_page_whole(tmp_path, study, records, monkeypatch):
    page = write_report(tmp_path, study, records, "first")
    before = page.read_bytes()
    files = sorted(os.listdir(tmp_path))

    def replace(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(OSError, match="no space"):
        write_report(tmp_path, study, records, "second")
    assert page.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == files  # and no temporary files


def test_a_report_without_any_finished_run(tmp_path, study, make_record):
    failed = [
        make_record(arm, status="failed", metrics={"steps": 1}, history={}, error="no", traceback="T")
        for arm in ("adamw", "frozen")
    ]
    page = Page(write_report(tmp_path, study, failed, "c").read_text(encoding="utf-8"))
    assert "2 of 2 runs failed" in page.text
    assert not page.images


def test_the_mean_carries_the_last_value_of_a_run_that_ended(tmp_path):
    curves = [Curve("a", 0, "x", [0, 1, 2], [1.0, 2.0, 3.0]), Curve("a", 1, "x", [0, 1], [3.0, 4.0])]
    steps, mean = mean_curve(curves)
    assert steps.tolist() == [0, 1, 2]
    assert mean.tolist() == [2.0, 3.0, 3.5]


def test_curves_are_drawn_from_their_values():
    ax = Figure().add_subplot()
    curves = [Curve("a", seed, "x", [0, 1], [0.25 * seed, 0.5]) for seed in (0, 1)]
    plot_curves(ax, curves, "accuracy (%)", percent=True, reference=(0.3, "chance"))
    drawn = [np.asarray(line.get_ydata()).tolist() for line in ax.lines]
    assert drawn == [[0.0, 50.0], [25.0, 50.0], [12.5, 50.0], [30.0, 30.0]]
    assert ax.get_ylabel() == "accuracy (%)"
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["a", "chance"]
