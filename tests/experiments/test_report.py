import csv
import html.parser
import json
import os

import numpy as np
import pytest
from geodescent.experiments.plots import Curve, mean_curve, plot_curves
from geodescent.experiments.readme import headline_tables, update_readme
from geodescent.experiments.report import markdown_text, report_folder
from geodescent.experiments.results import ResultsError, ResultsStore
from matplotlib.figure import Figure

HOSTILE = "<script>alert('x')</script>&\"'|`"


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
def store(tmp_path):
    """Writes a results folder as a study does: lines of roles, and the plan; returns the folder."""

    def write(roles, name="runs", command="geodescent study modular --seeds 3", **plan):
        folder = tmp_path / name
        identity = ("study", "arm", "seed", "lr", "settings_hash")
        with ResultsStore(folder) as results:
            for record in (record for records in roles.values() for record in records):
                results.append(record)
        jobs = [{"role": role, **{k: r[k] for k in identity}} for role, records in roles.items() for r in records]
        content = {
            "study": "modular",
            "size": "default",
            "command": command,
            "settings": {"lr": 1e-3, "steps": 8},
            "arms": ["adamw"],
            "grid": {"lrs": [1e-3]},
            "choices": {},
            "matched": {},
            "jobs": jobs,
        }
        (folder / "plan.json").write_text(json.dumps(content | plan), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def records(make_record):
    steps = {"adamw": (100, 300, None), "frozen": (150, 200, 250), "riemannian-adam": (90, 210, 330)}
    accuracy = {"adamw": (0.8, 0.81, 0.85), "frozen": (0.81, 0.84, 0.85), "riemannian-adam": (0.9, 0.91, 0.96)}
    return [
        make_record(arm, seed, metrics={"steps_to_95_test": value, "test_accuracy": accuracy[arm][seed]})
        for arm, own in steps.items()
        for seed, value in enumerate(own)
    ]


@pytest.fixture
def all_roles(records, make_record):
    """Every role that a report knows."""

    def runs(arms, metrics, hash_="1" * 12, **changes):
        return [
            make_record(
                arm, seed, metrics=metrics | {"test_accuracy": 0.5 + 0.01 * seed * i}, settings_hash=hash_, **changes
            )
            for i, arm in enumerate(arms)
            for seed in (0, 1, 2)
        ]

    cycles = {
        name: [1.0, 0.1, 0.6, 0.06, 0.5]
        for name in ("validation_loss", "validation_accuracy", "qk_angle", "qk_condition", "qk_norm", "rest_norm")
    }
    arms = ("riemannian-adam", "riemannian-adam-elementwise", "scalar-project", "adamw-project", "rsgd")
    tuning = [record | {"seed": 1000 + record["seed"], "split": "validation"} for record in runs(("adamw",), {})]
    control_tuning = [record | {"settings_hash": "4" * 12} for record in tuning]
    growth = runs(("adamw", "riemannian-adam"), {}, "2" * 12)
    for record in growth:
        record["config"] = record["config"] | {"study": record["config"]["study"] | {"train_images": 1000}}
    return {
        "tuning": tuning,
        "report": records,
        "matched": runs(arms, {}),
        "growth": growth,
        "cycles": runs(("adamw", "riemannian-adam"), {}, "3" * 12, cycles=cycles),
        "control-tuning": control_tuning,
        "control": runs(("adamw", "frozen"), {"steps_to_95_test": None}, "4" * 12),
    }


def test_the_page_is_self_contained_and_says_what_it_must(store, records):
    page_path = report_folder(store({"report": records}))
    text = page_path.read_text(encoding="utf-8")
    page = Page(text)
    assert page_path.name == "index.html"
    assert len(page.images) == 8
    for image in page.images:
        assert image["src"].startswith("data:image/svg+xml;base64,")
        assert len(image["alt"]) > 40
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert text.count("http") == text.count("http-equiv")  # nothing is fetched
    assert all((page_path.parent / link).is_file() for link in page.links)
    for needed in ("geodescent study modular --seeds 3", "torch 2", "a processor", "0, 1, 2", "adamw", "2 of 3"):
        assert needed in page.text
    # a stranger sees the verdicts, then the plots, then the claims with their figures
    order = ["Claims at this size", "Plots that decide", "what is claimed", "What the arms are", "How this was made"]
    assert [page.text.index(name) for name in order] == sorted(page.text.index(name) for name in order)
    assert "3a" in page.text
    assert "undecided at this size" in page.text


def test_every_role_has_its_figure_or_table(store, all_roles):
    page_path = report_folder(store(all_roles))
    page = Page(page_path.read_text(encoding="utf-8"))
    names = {path.stem for path in page_path.parent.glob("*.svg")}
    assert {"differences", "headline", "factorial", "growth", "freezing", "cycles_qk_angle", "cycles_qk_norm"} <= names
    assert len(page.images) == len(names)
    sweep = "Sweep on validation data"
    titles = ("Paired statistics", "Arms at one step length", "Negative control", sweep, f"{sweep} of the control")
    for title in titles:
        assert title in page.text
    for number in ("2b", "3a", "3b", "4e", "5d", "6a", "6b", "6c"):
        assert number in page.text


def test_the_markdown_says_the_same(store, all_roles):
    page_path = report_folder(store(all_roles))
    page = Page(page_path.read_text(encoding="utf-8"))
    text = (page_path.parent / "report.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("| "):
            for cell in line.strip("| ").replace("\\|", "¦").split(" | "):
                plain = cell.replace("¦", "|").replace("\\", "")
                for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
                    plain = plain.replace(entity, character)
                assert plain in page.text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 30
    images = [part.split(")")[0] for part in text.split("](")[1:] if ".svg)" in part]
    assert len(images) == len(page.images)
    assert all((page_path.parent / image).is_file() for image in images)


def test_text_from_arms_settings_and_errors_is_escaped(store, make_record):
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
    path = report_folder(store({"report": hostile}, command=f"geodescent --out {HOSTILE}"))
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags
    assert "<script" not in text
    assert page.text.count(HOSTILE) >= 6
    assert all("<script" not in image["src"] for image in page.images)
    markdown = (path.parent / "report.md").read_text(encoding="utf-8")
    outside_code = "".join(markdown.split("`geodescent")[:1])
    assert "<script" not in outside_code


def test_csv_files_hold_the_stored_values(store, records):
    records[0]["history"]["train_loss"] = [2.0, 1 / 3, 1e-17]
    records[0]["history"]["query_condition"] = [1.0, None, 0.1 + 0.2]
    folder = report_folder(store({"report": records})).parent

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

    headline = {(row["arm"], int(row["seed"])): row["steps_to_95_test"] for row in rows("headline.csv")}
    assert headline["adamw", 2] == ""
    assert float(headline["riemannian-adam", 1]) == 210
    differences = {(row["arm"], int(row["seed"])): float(row["difference_steps"]) for row in rows("differences.csv")}
    assert differences["frozen", 0] == 50
    assert differences["frozen", 2] == 250 - 8  # not reached counts as the last step
    assert [row["arm"] for row in rows("table.csv")] == ["adamw", "frozen", "riemannian-adam"]


def test_the_same_results_give_the_same_files(store, all_roles):
    one, two = (report_folder(store(all_roles, name)).parent for name in ("a", "b"))
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in two.iterdir()}


def test_a_job_without_a_line_is_still_to_come(store, all_roles):
    """A study that was stopped halfway has a report of what there is."""
    folder = store(all_roles)
    plan = json.loads((folder / "plan.json").read_text())
    plan["jobs"] += [job | {"seed": 77} for job in plan["jobs"]]
    (folder / "plan.json").write_text(json.dumps(plan))
    assert report_folder(folder).is_file()


@pytest.mark.parametrize("content", [None, "{", "[]", '{"jobs": 3}', '{"jobs": [{}]}', '{"jobs": []}'])
def test_a_folder_without_a_usable_plan_is_one_error(tmp_path, content):
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ResultsError, match=r"plan\.json"):
        report_folder(tmp_path)
    assert not (tmp_path / "report").exists()


def test_a_crash_leaves_the_old_page_whole(store, records, monkeypatch):
    folder = store({"report": records})
    page = report_folder(folder)
    before = page.read_bytes()
    files = sorted(os.listdir(page.parent))

    def replace(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(OSError, match="no space"):
        report_folder(folder)
    assert page.read_bytes() == before
    assert sorted(os.listdir(page.parent)) == files  # and no temporary files


def test_a_report_without_any_finished_run(store, make_record):
    failed = [
        make_record(arm, status="failed", metrics={"steps": 1}, history={}, error="no", traceback="T")
        for arm in ("adamw", "frozen")
    ]
    page = Page(report_folder(store({"report": failed})).read_text(encoding="utf-8"))
    assert "2 of 2 runs failed" in page.text
    assert not page.images


# --- the tables in a README -----------------------------------------------------------------------------------------


def test_the_readme_gets_the_tables_between_its_marks_and_keeps_the_rest(tmp_path, store, records):
    folder = store({"report": records})
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- studies -->\nold\n<!-- end of studies -->\nafter\n", encoding="utf-8")
    update_readme(readme, [folder])
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- studies -->\n### Modular arithmetic\n")
    assert text.endswith("<!-- end of studies -->\nafter\n")
    assert "old" not in text
    assert "| riemannian-adam | 0.001 | 3 |" in text
    assert headline_tables([folder]) in text
    update_readme(readme, [folder])
    assert readme.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("text", ["", "<!-- end of studies --><!-- studies -->", "<!-- studies -->"])
def test_a_readme_without_the_marks_is_left_alone(tmp_path, store, records, text):
    readme = tmp_path / "README.md"
    readme.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="must have the lines"):
        update_readme(readme, [store({"report": records})])
    assert readme.read_text(encoding="utf-8") == text


def test_markdown_text_shows_what_it_was_given():
    assert markdown_text("a|b <i> *x* `c` [d] & e_f\ng") == r"a\|b &lt;i&gt; \*x\* \`c\` \[d\] &amp; e\_f g"


# --- plots ----------------------------------------------------------------------------------------------------------


def test_the_mean_carries_the_last_value_of_a_run_that_ended():
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
