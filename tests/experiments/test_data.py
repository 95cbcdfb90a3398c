import numpy as np
import pytest
import torch
from geodescent.experiments.data_cifar10 import load_cifar10
from geodescent.experiments.data_modular import operation_pairs


def _triples(split):
    return {(a, b, c) for (a, b, _), c in zip(split[0].tolist(), split[1].tolist(), strict=True)}


@pytest.mark.parametrize(("operation", "rule"), [("add", int.__add__), ("subtract", int.__sub__)])
def test_the_splits_are_all_pairs_once_with_right_answers(operation, rule):
    data = operation_pairs(7, 0.4, seed=3, operation=operation)
    splits = [_triples(split) for split in (data.train, data.validation, data.test)]
    assert [len(split) for split in splits] == [20, 14, 15]
    assert set.union(*splits) == {(a, b, rule(a, b) % 7) for a in range(7) for b in range(7)}
    assert (data.train[0][:, 2] == 7).all()


def test_the_seed_decides_the_split():
    one, same, other = (operation_pairs(7, 0.4, seed).train[0] for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((1, 0.5), "p must"), ((7, 1.0), "train_fraction"), ((7, 0.0), "train_fraction"), ((7, 0.5, 0, "power"), "add")],
)
def test_modular_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        operation_pairs(*arguments[:2], *(arguments[2:] or (0,)))


# --- CIFAR-10 -----------------------------------------------------------------------------------------------------


def test_pixels_and_labels_are_those_of_the_file(tmp_path, write_cifar):
    raw = write_cifar(tmp_path / "cifar-10-batches-bin")
    data = load_cifar10(tmp_path, train_images=50, validation_images=30, seed=0, records=20)
    images, labels = data.test
    assert images.shape == (20, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.tolist() == raw["test_batch.bin"][:, 0].tolist()
    # record 4, green, row 2, column 5 is byte 1 + 1024 + 2·32 + 5
    restored = images[4, 1, 2, 5].item() * data.std[1] + data.mean[1]
    assert restored * 255 == pytest.approx(raw["test_batch.bin"][4, 1 + 1024 + 2 * 32 + 5], abs=1e-3)


def test_the_training_images_are_normalized_and_the_folder_itself_is_accepted(tmp_path, write_cifar):
    write_cifar(tmp_path)
    images, labels = load_cifar10(tmp_path, 50, 30, seed=0, records=20).train
    assert images.double().mean(dim=(0, 2, 3)).abs().max() < 1e-6
    assert (images.double().std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-6
    assert torch.bincount(labels).tolist() == [5] * 10


def test_train_and_validation_are_disjoint_balanced_and_drawn_by_the_seed(tmp_path, write_cifar):
    write_cifar(tmp_path)
    first, same, other = (load_cifar10(tmp_path, 40, 60, seed, records=20) for seed in (0, 0, 1))
    assert torch.equal(first.train[0], same.train[0])
    assert not torch.equal(first.train[0], other.train[0])
    together = torch.cat([first.train[0], first.validation[0]]).flatten(1)
    assert len(torch.unique(together, dim=0)) == 100
    assert torch.bincount(first.validation[1]).tolist() == [6] * 10


def test_a_constant_channel_does_not_divide_by_zero(tmp_path, write_cifar):
    raw = write_cifar(tmp_path)
    for name, content in raw.items():
        content[:, 1:1025] = 7
        (tmp_path / name).write_bytes(content.tobytes())
    assert load_cifar10(tmp_path, 50, 30, seed=0, records=20).train[0][:, 0].abs().max() < 1e-6


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_the_wrong_size_is_named_with_both_sizes(tmp_path, write_cifar, change):
    write_cifar(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"x")
    with pytest.raises(ValueError, match=rf"data_batch_3\.bin: found {len(content) + change:,} bytes.*61,460"):
        load_cifar10(tmp_path, 50, 30, seed=0, records=20)


def test_the_official_size_is_the_default(tmp_path, write_cifar):
    write_cifar(tmp_path)
    with pytest.raises(ValueError, match="expected 30,730,000"):
        load_cifar10(tmp_path, 50, 30, seed=0)


def test_a_label_above_nine_is_damage(tmp_path, write_cifar):
    raw = write_cifar(tmp_path)["test_batch.bin"]
    raw[6, 0] = 10
    (tmp_path / "test_batch.bin").write_bytes(raw.tobytes())
    with pytest.raises(ValueError, match=r"test_batch\.bin: record 6 has label 10"):
        load_cifar10(tmp_path, 50, 30, seed=0, records=20)


def test_missing_folder_and_file_are_named(tmp_path, write_cifar):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load_cifar10(tmp_path / "nowhere", 50, 30, seed=0)
    write_cifar(tmp_path)
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_2\.bin"):
        load_cifar10(tmp_path, 50, 30, seed=0)


@pytest.mark.parametrize(
    ("train", "validation", "message"), [(9, 30, "at least 10"), (50, 0, "validation"), (80, 21, "100")]
)
def test_cifar_arguments_are_checked(tmp_path, write_cifar, train, validation, message):
    write_cifar(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_cifar10(tmp_path, train, validation, seed=0, records=20)


def test_training_batches_cover_every_image_once_an_epoch_in_the_same_order_each_time(tmp_path, write_cifar):
    from geodescent.experiments.study_cifar10 import Cifar10Study

    write_cifar(tmp_path)
    study = Cifar10Study(
        data_folder=str(tmp_path), train_images=50, validation_images=20, epochs=2, batch_size=16, records=20
    )
    data = study.data(seed=0)
    assert study.steps_per_epoch == 4

    def epochs():
        batches = data.batches()
        return [torch.cat([next(batches)[0] for _ in range(4)]).flatten(1) for _ in range(2)]

    (first, second), again = epochs(), epochs()
    assert torch.equal(first, again[0])
    assert not torch.equal(first, second)
    for epoch in (first, second):
        assert np.array_equal(torch.unique(epoch, dim=0), torch.unique(second, dim=0))
        assert len(epoch) == 50
