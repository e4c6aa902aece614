"""One thread a test process: two busy cores make OpenMP crawl. The longest files begin first, lest one ends alone."""

import pytest
import torch

torch.set_num_threads(1)

LONGEST = ("test_demo.py", "test_evaluate_torchrun.py", "test_cli_evaluate.py", "test_site.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
