import torch
from geodescent.attention import StiefelAttention
from geodescent.optim import parameter_report


def test_parameter_report_says_what_steps_what():
    layer = StiefelAttention(8, 2, dtype=torch.float64)
    layer.k_proj.weight.requires_grad_(False)
    report = parameter_report(layer)
    rows = {row.name: row for row in report.rows}
    assert rows["q_proj.weight"].stepped_by == "a Riemannian step"
    assert rows["q_proj.weight"].shape == (2, 8, 4)
    assert 0 <= (rows["q_proj.weight"].point_error or 0) < 1e-14
    assert "EuclideanMetric" in str(rows["q_proj.weight"].manifold)
    assert rows["k_proj.weight"].stepped_by.startswith("nothing")
    assert rows["v_proj.weight"].stepped_by == "an AdamW step"
    assert rows["v_proj.weight"].manifold is None
    assert len(repr(report).splitlines()) == 1 + len(list(layer.parameters()))
    assert report.to_dict()["rows"][0]["name"] == report.rows[0].name
