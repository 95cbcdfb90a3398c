import json
import os
from typing import Any

import pytest
import torch
from geodescent.analysis import attention_geometry, drift
from geodescent.experiments import cli
from torch import nn


def run(capsys, *arguments):
    """Exit status, output and errors of the command."""
    try:
        cli.main(["inspect", *map(str, arguments)])
    except SystemExit as stop:
        status = stop.code
    else:
        status = 0
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def model(layers=3, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.ModuleDict({f"h{i}": nn.MultiheadAttention(16, 4) for i in range(layers)})


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints of one shape."""
    paths = []
    for seed in (0, 1):
        path = tmp_path / str(seed) / "model.pt"
        path.parent.mkdir()
        torch.save(model(seed=seed).state_dict(), path)
        (path.parent / "config.json").write_text('{"num_attention_heads": 4}')
        paths.append(path)
    return paths


def test_geometry_by_layer_and_worst_heads(saved, capsys):
    status, out, _ = run(capsys, saved[0])
    assert status == 0
    assert len(out.splitlines()) <= 30
    assert max(map(len, out.splitlines())) <= 150
    assert "\x1b" not in out  # no colours in a pipe
    geometry = attention_geometry(model())
    for i, layer in enumerate(geometry.layers):
        row = next(line for line in out.splitlines() if line.startswith(f"│ {i} "))
        median = layer.query_condition.sort().values[1:3].mean().item()
        assert f"{median:.3g}" in row
    worst = max(float(torch.maximum(g.query_condition, g.key_condition).max()) for g in geometry.layers)
    first = out.split("Worst heads")[1].splitlines()[4]
    assert f"{worst:.3g}" in first


def test_drift_beside_random_subspaces(saved, capsys):
    status, out, _ = run(capsys, saved[1], "--against", saved[0], "--samples", "3", "--worst", "1")
    assert status == 0
    assert len(out.splitlines()) <= 45
    assert "mean over 3 draws of independent random subspaces" in out
    report: Any = drift(model(seed=0), model(seed=1), samples=3)
    moved = max(float(layer.gauge_movement.max()) for layer in report.layers)
    assert f"{moved:.3g}" in out.split("moved most")[1]
    share = (100 * report["h1"].gauge_distance / report["h1"].random_gauge_distance).sort().values[1:3].mean().item()
    row = next(line for line in out.split("Drift from")[1].splitlines() if line.startswith("│ 1 "))
    assert f"{share:.3g}" in row


def test_json_has_every_number(saved, tmp_path, capsys):
    broken = model().state_dict()
    broken["h0.in_proj_weight"][0, 0] = torch.nan
    torch.save(broken, saved[1])
    target = tmp_path / "new" / "out.json"
    status, out, _ = run(capsys, saved[1], "--against", saved[0], "--json", target, "--samples", "2")
    assert status == 0
    assert "nan" in out.split("Worst heads")[1]  # a broken head is the worst of all

    def refuse(constant):
        raise AssertionError(constant)

    data = json.loads(target.read_text(encoding="utf-8"), parse_constant=refuse)
    layers = data["geometry"]["layers"]
    assert [layer["name"] for layer in layers] == ["h0", "h1", "h2"]
    assert layers[0]["query_condition"][0] == "nan"
    want = attention_geometry(model())["h1"]
    assert layers[1]["spectrum"] == want.spectrum.tolist()
    assert data["drift"]["layers"][2]["gauge_distance"] == pytest.approx([0.0] * 4, abs=1e-12)
    assert data["checkpoint"] == str(saved[1])


def test_many_layers_share_rows(tmp_path, capsys):
    torch.save(model(layers=40).state_dict(), tmp_path / "deep.pt")
    status, out, _ = run(capsys, tmp_path / "deep.pt", "--heads", "4", "--rows", "8")
    assert status == 0
    assert len(out.splitlines()) <= 30
    rows = [line.split("│")[1:3] for line in out.split("Worst heads")[0].splitlines() if line.startswith("│")]
    assert len(rows) == 8
    assert sum(int(heads) for _, heads in rows) == 160
    assert rows[0][0].strip() == "0–4"
    status, out, _ = run(capsys, tmp_path / "deep.pt", "--heads", "4", "--rows", "40", "--worst", "0")
    assert "Worst heads" not in out
    assert len(out.splitlines()) > 40


def test_names_from_a_file_are_not_read_as_markup(tmp_path, capsys):
    state = {f"[bold]x[/red].{k}": v for k, v in nn.MultiheadAttention(16, 4).state_dict().items()}
    state["[/b]y.attn.strange.weight"] = torch.ones(2, 2)
    torch.save(state, tmp_path / "m.pt")
    status, out, _ = run(capsys, tmp_path / "m.pt", "--heads", "4")
    assert status == 0
    assert "[bold]x[/red]" in out
    assert "left out: [/b]y.attn: no known layout has its weights (strange.weight)" in out


def test_what_cannot_be_inspected_is_one_line_and_status_2(saved, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"q_proj.weight": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "other.pt")
    torch.save(model(layers=2).state_dict(), tmp_path / "short.pt")
    (tmp_path / "model.zip").write_bytes(b"")
    for arguments, why in (
        ([tmp_path / "evil.pt"], "was refused, nothing in it was run"),
        ([saved[0], "--against", tmp_path / "evil.pt"], "was refused, nothing in it was run"),
        ([tmp_path / "text.pt"], "cannot be read"),
        ([tmp_path / "other.pt"], "no attention layer found"),
        ([tmp_path / "short.pt"], "give num_heads (--heads on the command line)"),
        ([tmp_path / "short.pt", "--heads", "5"], "num_heads = 5 does not divide the width 16"),
        ([tmp_path / "short.pt", "--heads", "4", "--kv-heads", "2"], "num_key_value_heads = 2"),
        ([tmp_path / "short.pt", "--heads", "4", "--layout", "nonsense"], "one of torch"),
        ([tmp_path / "short.pt", "--heads", "4", "--against", saved[0]], "before has the layers ['h2']"),
        ([tmp_path / "missing.pt"], "there is no"),
        ([tmp_path / "model.zip"], "is no checkpoint this reads"),
        ([saved[0], "--json", tmp_path], "Is a directory"),
    ):
        status, _, err = run(capsys, *arguments)
        assert status == 2, arguments
        assert err.count("\n") == 1
        assert err.startswith("geodescent: error: ")
        assert why in err
    assert not (tmp_path / "ran").exists()
