import json
import os
import pickle
import sys
import zipfile

import pytest
import torch
from geodescent.analysis import Checkpoint, attention_geometry, drift
from geodescent.attention import StiefelAttention
from torch import nn


class Evil:
    """A pickle of this runs a command when it is loaded the old way."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def zipped(value, path):
    torch.save(value, path)


def legacy(value, path):
    torch.save(value, path, _use_new_zipfile_serialization=False)


def raw(value, path):
    path.write_bytes(pickle.dumps(value["k_proj.weight"], protocol=2))


@pytest.mark.parametrize("write", [zipped, legacy, raw])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_code_in_a_file_is_refused_and_not_run(tmp_path, write, suffix):
    ran, path = tmp_path / "ran", tmp_path / f"model{suffix}"
    write({"q_proj.weight": torch.ones(4, 4), "k_proj.weight": Evil(ran)}, path)
    with pytest.raises(ValueError, match=r"was refused, nothing in it was run.*\(\w+\.system\)") as error:
        attention_geometry(path, num_heads=2)
    assert "\n" not in str(error.value)
    assert not ran.exists()
    with pytest.raises(ValueError, match="was refused"):
        drift(path, path, num_heads=2)
    # the file is what it is taken for: unpickling it runs the command
    if write is raw:
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert ran.exists()


@pytest.mark.parametrize("write", [zipped, legacy])
def test_a_file_says_what_its_state_dict_says(tmp_path, write):
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 4), "b": StiefelAttention(16, 2, logit_scale="spectrum")})
    write(model.state_dict(), tmp_path / "m.pt")
    want = attention_geometry(model.state_dict(), num_heads=4)
    assert attention_geometry(tmp_path / "m.pt", num_heads=4).to_dict() == want.to_dict()
    assert attention_geometry(str(tmp_path / "m.pt"), num_heads={"a": 4}).to_dict() == want.to_dict()
    assert attention_geometry(model).to_dict() == want.to_dict()


@pytest.mark.parametrize("where", ["state_dict", "model_state_dict", "model", "weights"])
def test_weights_inside_a_training_checkpoint(tmp_path, where):
    module = nn.MultiheadAttention(16, 4)
    optimizer = {"state": {0: {"exp_avg": torch.zeros(2, 2)}}, "param_groups": [{"lr": 0.1}]}
    torch.save({where: module.state_dict(), "optimizer": optimizer, "step": torch.tensor(3)}, tmp_path / "m.ckpt")
    assert attention_geometry(tmp_path / "m.ckpt", 4).to_dict() == attention_geometry(module).to_dict()


def test_a_mapping_in_natural_order_with_shapes(tmp_path):
    torch.save({f"h.{i}.w": torch.full((i + 1, 2), float(i)) for i in (10, 2, 1)}, tmp_path / "m.pt")
    with Checkpoint(tmp_path / "m.pt") as state:
        assert list(state) == ["h.1.w", "h.2.w", "h.10.w"]
        assert len(state) == 3
        assert "h.3.w" not in state
        assert state.shape("h.10.w") == (11, 2)
        assert torch.equal(state["h.2.w"], torch.full((3, 2), 2.0))
        with pytest.raises(KeyError):
            state["h.3.w"]


def shards(folder):
    module = nn.ModuleDict({f"l{i}": nn.MultiheadAttention(8, 2) for i in range(3)})
    where = {}
    for i in range(3):
        part = {k: v for k, v in module.state_dict().items() if k.startswith(f"l{i}.")}
        torch.save(part, folder / f"part-{i}.bin")
        where |= dict.fromkeys(part, f"part-{i}.bin")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return module, index, where


def test_folders_and_shards(tmp_path):
    module, index, where = shards(tmp_path)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    assert attention_geometry(tmp_path).to_dict() == attention_geometry(module).to_dict()
    assert attention_geometry(index).to_dict() == attention_geometry(module).to_dict()
    for name, why in (
        ("../elsewhere.bin", "no checkpoint file of its own folder"),
        ("/etc/passwd", "no checkpoint file of its own folder"),
        ("config.json", "no checkpoint file of its own folder"),
        ("part-9.bin", "is not there"),
    ):
        index.write_text(json.dumps({"weight_map": where | {"l0.in_proj_weight": name}}))
        with pytest.raises(ValueError, match=why):
            attention_geometry(tmp_path)
    index.write_text(json.dumps({"weight_map": where | {"l0.in_proj_weight": "part-1.bin"}}))
    with pytest.raises(ValueError, match=r"names 'l0.in_proj_weight' in part-1.bin, which has no such tensor"):
        attention_geometry(tmp_path)
    for text, why in (("{", "no readable JSON"), ("[]", "must hold a JSON object"), ("{}", "has no weight_map")):
        index.write_text(text)
        with pytest.raises(ValueError, match=why):
            attention_geometry(tmp_path)


def test_a_folder_of_one_file_and_of_several(tmp_path):
    module = nn.MultiheadAttention(16, 4)
    torch.save(module.state_dict(), tmp_path / "last.pt")
    assert attention_geometry(tmp_path, 4).to_dict() == attention_geometry(module).to_dict()
    torch.save(module.state_dict(), tmp_path / "first.pt")
    with pytest.raises(ValueError, match=r"found first.pt, last.pt: name the file"):
        attention_geometry(tmp_path, 4)


def bad_files(folder):
    torch.save({"w": torch.ones(20, 20)}, folder / "good.pt")
    good = (folder / "good.pt").read_bytes()
    contents = {
        "empty.pt": b"",
        "text.pt": b"hello world\n",
        "cut.pt": good[: len(good) // 2],
        "zip.pt": b"PK\x03\x04" + b"\0" * 40,
        "noise.bin": bytes(range(256)) * 4,
        "unknown.npz": good,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    with zipfile.ZipFile(folder / "other.pt", "w") as file:
        file.writestr("a.txt", "no tensors")
    torch.save([torch.ones(2)], folder / "list.pt")
    torch.save({}, folder / "nothing.pt")
    torch.save({"lr": 0.1, "bias": torch.ones(3)}, folder / "vectors.pt")
    torch.save({"ema": {"w": torch.ones(2, 2)}, "raw": {"w": torch.ones(2, 2)}}, folder / "two.pt")
    return [*contents, "other.pt", "list.pt", "nothing.pt", "vectors.pt", "two.pt"]


def test_what_cannot_be_read_is_one_clear_line(tmp_path):
    for name in bad_files(tmp_path):
        with pytest.raises(ValueError, match=name) as error:
            Checkpoint(tmp_path / name)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400
    with pytest.raises(FileNotFoundError, match=r"there is no .*missing.pt"):
        Checkpoint(tmp_path / "missing.pt")
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="found none: name the file"):
        Checkpoint(tmp_path / "none")
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(ValueError, match=r"config\.json is no readable JSON"):
        Checkpoint(tmp_path / "good.pt")


def test_safetensors_are_not_needed_until_they_are(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)  # as if it were not installed
    with pytest.raises(ImportError, match="needs safetensors: pip install safetensors"):
        attention_geometry(tmp_path)
