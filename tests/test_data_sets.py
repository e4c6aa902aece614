"""Image sets: what is accepted, what is refused, and what a batch holds."""

import numpy as np
import pytest
import torch

from generalist.core.errors import DataError
from generalist.core.random import integers
from generalist.data.digits import load_digits
from generalist.data.sets import ImageSet, from_arrays, iterate, join

GREY = np.arange(2 * 4 * 5, dtype=np.uint8).reshape(2, 4, 5)


def test_layouts_give_the_same_set() -> None:
    nchw = integers(256, 0, "test", shape=(6, 3, 5, 7)).to(torch.uint8).numpy()
    first = from_arrays(nchw, [0, 1, 2, 0, 1, 2])
    last = from_arrays(torch.from_numpy(nchw).permute(0, 2, 3, 1), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert first.shape == last.shape == (3, 5, 7)
    assert first.checksum() == last.checksum()
    assert first.classes == ["0", "1", "2"]
    assert from_arrays(GREY, [0, 1]).shape == (1, 4, 5)


def test_ambiguous_layout_needs_to_be_told() -> None:
    images = np.zeros((2, 3, 8, 3), np.uint8)
    with pytest.raises(DataError, match=r"layout=.NCHW."):
        from_arrays(images, [0, 1])
    assert from_arrays(images, [0, 1], layout="NCHW").shape == (3, 8, 3)
    assert from_arrays(images, [0, 1], layout="NHWC").shape == (3, 3, 8)
    with pytest.raises(DataError, match="layout"):
        from_arrays(np.zeros((2, 8, 8, 8), np.uint8), [0, 1])


def _images(value: float) -> np.ndarray:
    images = np.full((2, 1, 4, 4), 0.5)
    images[1, 0, 2, 2] = value
    return images


@pytest.mark.parametrize(
    ("images", "labels", "classes", "message"),
    [
        (_images(float("nan")), [0, 1], None, "nan"),
        (_images(float("inf")), [0, 1], None, "inf"),
        (_images(1.01), [0, 1], None, r"\[0,1\]"),
        (_images(-0.01), [0, 1], None, r"\[0,1\]"),
        (GREY.astype(np.int64), [0, 1], None, "uint8"),
        (np.array([[None]]), [0], None, "shape"),
        ([np.zeros((3, 3)), np.zeros((4, 4))], [0, 1], None, "one array"),
        (GREY, [0], None, "labels of shape"),
        (GREY, [[0], [1]], None, "labels of shape"),
        (GREY, [0, -1], None, "-1"),
        (GREY, [0, 10**12], None, "renumber"),
        (GREY, [0.0, 1.0], None, "integers"),
        (GREY, [True, False], None, "integers"),
        (GREY[:0], [], None, "empty"),
        (GREY[0], [0, 0, 0, 0], None, "shape"),
        (GREY, [0, 2], ["a", "b"], "label 2"),
        (GREY, [0, 1], ["a", "a"], "different"),
    ],
)
def test_refusals(images: object, labels: object, classes: list[str] | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(images, labels, classes=classes)


def test_set_does_not_alias_the_callers_array() -> None:
    images = GREY.copy()
    data = from_arrays(images, [0, 1])
    before = data.checksum()
    images[:] = 0
    assert data.checksum() == before


def test_checksum_sees_every_part() -> None:
    sums = {
        from_arrays(GREY, [0, 1]).checksum(),
        from_arrays(GREY[::-1], [0, 1]).checksum(),
        from_arrays(GREY, [1, 0]).checksum(),
        from_arrays(GREY, [0, 1], classes=["a", "b"]).checksum(),
        from_arrays(GREY.reshape(2, 5, 4), [0, 1]).checksum(),
    }
    assert len(sums) == 5
    assert all(len(value) == 64 for value in sums)


def test_batch_is_the_images_over_255() -> None:
    data = from_arrays(GREY, [0, 1])
    batch = data.batch(torch.tensor([1, 0, 1]))
    assert batch.x.dtype == torch.float32
    assert torch.equal(batch.x[0, 0], torch.from_numpy(GREY[1]).double().div(255).float())
    assert batch.y.tolist() == [1, 0, 1]
    assert batch.index.tolist() == [1, 0, 1]
    assert batch.augmentation == {}


def test_float_images_stay_as_they_are() -> None:
    data = from_arrays(_images(1.0).astype(np.float16), [0, 1])
    assert data.images.dtype == torch.float32
    assert data.batch(torch.tensor([1])).x.max() == 1.0


def test_join_numbers_the_second_after_the_first() -> None:
    first, second = from_arrays(GREY, [0, 1]), from_arrays(GREY[::-1] / 255.0, [1, 0], name="more")
    both = join(first, second)
    assert len(both) == 4
    assert both.labels.tolist() == [0, 1, 1, 0]
    assert torch.allclose(both.batch(torch.tensor([0])).x, both.batch(torch.tensor([3])).x)
    with pytest.raises(DataError, match="resize"):
        join(first, from_arrays(np.zeros((1, 1, 8, 8)), [0]))
    with pytest.raises(DataError, match="3 classes"):
        join(first, from_arrays(GREY, [0, 2]))


def test_a_set_knows_whether_its_classes_were_named() -> None:
    inferred, named = from_arrays(GREY, [0, 1]), from_arrays(GREY, [0, 1], classes=["a", "b"])
    assert (inferred.named, named.named) == (False, True)
    assert not inferred.to("cpu").named
    assert not join(inferred, named).named and join(named, inferred).named
    assert load_digits()[1].named


class _Streamed(ImageSet):
    @property
    def resident(self) -> bool:
        return False


def test_iterate_gives_the_same_batches_streamed_or_not() -> None:
    data, _ = load_digits()
    streamed = _Streamed(data.images, data.labels, data.classes, data.name)
    batches = list(torch.arange(50).split(16))
    for one, other in zip(iterate(data, batches), iterate(streamed, batches), strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.index, other.index)
    assert list(iterate(streamed, [])) == []


def test_digits_split() -> None:
    train, test = load_digits()
    assert (len(train), len(test)) == (1297, 500)
    assert train.shape == test.shape == (1, 8, 8)
    assert test.labels.bincount().tolist() == [50] * 10
    assert (train.labels.bincount() + 50).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert int(train.images.max()) == 255
    levels = {round(value * 255 / 16) for value in range(17)}
    assert set(train.images.unique().tolist()) == levels
    # Pinned: a changed split would silently change every number ever published with it.
    assert train.checksum() == "9abcc5f27c944fdad8a1cf74ed42139bb3f299cd43fa903273d22b9dfc5ad482"
