"""The example on a small text: by a loop, by Trainer, and in two processes to the weights of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from geodescent.attention import constrain
from transformers import GPT2Config, GPT2LMHeadModel

EXAMPLE = Path(__file__).parents[2] / "examples" / "char_gpt.py"
SMALL = ["--steps", "6", "--batch", "4", "--length", "16", "--width", "16", "--layers", "2", "--heads", "2"]
SMALL += ["--every", "2", "--lr", "0.01"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = ["the cat sat", "a dog ran", "the bird sang", "a cat ran"]
    path.write_text(". ".join(words[(7 * i * i + i) % 4] for i in range(80)))
    return path


def run(text, out, *options, processes=1):
    command = [sys.executable, str(EXAMPLE)]
    if processes > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += [str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, str(text), *SMALL, "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        cwd=out.parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, torch.load(out / "weights.pt", weights_only=True)


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    return run(text, tmp_path_factory.mktemp("alone") / "out", "--double")


def losses(printed):
    return [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]


def test_a_loop_trains_and_samples(alone):
    printed, weights = alone
    assert "2 constrained, 0 skipped" in printed
    assert losses(printed)[-1] < losses(printed)[0]
    assert "nats a character" in printed
    assert weights["transformer.h.0.attn.c_attn.weight"].shape == (16, 48)  # GPT-2's own names and shapes


@pytest.mark.parametrize("options", [(), ("--fsdp",)], ids=["ddp", "fsdp"])
def test_two_processes_train_to_the_weights_of_one(text, alone, tmp_path, options):
    printed, weights = run(text, tmp_path / "out", "--double", *options, processes=2)
    assert losses(printed)
    assert list(weights) == list(alone[1])
    for name, value in weights.items():
        torch.testing.assert_close(value, alone[1][name], rtol=0, atol=1e-5, msg=name)


def test_the_start_is_not_where_training_ends(text, alone):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(set(text.read_text())), n_positions=16, n_embd=16, n_layer=2, n_head=2)
    start = GPT2LMHeadModel(config).double()
    constrain(start)
    moved = [(start.state_dict()[name] - value).abs().max() for name, value in alone[1].items() if "attn" in name]
    assert max(moved) > 1e-2  # or the comparison above would say nothing


def test_the_trainer_trains_the_same_model(text, tmp_path):
    printed, weights = run(text, tmp_path / "out", "--trainer")
    assert "2 constrained" in printed
    assert "validation loss" in printed
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())


def test_unconstrained_attention_under_adamw(text, tmp_path):
    printed, _ = run(text, tmp_path / "out", "--unconstrained")
    assert "constrained," not in printed
    assert losses(printed)[-1] < losses(printed)[0]
