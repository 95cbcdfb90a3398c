"""The snippets of the docs run, each by itself as its reader would run it."""

import re
import warnings
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "constrain_a_model.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def test_three_models_before_and_after():
    assert len(SNIPPETS) == 6
    assert [("constrain" in snippet) for snippet in SNIPPETS] == [False, True] * 3


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_a_snippet_runs(index, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        exec(
            compile(SNIPPETS[index], f"{PAGE.name}, snippet {index}", "exec"), {"folder": tmp_path, "dataset": Tokens()}
        )
