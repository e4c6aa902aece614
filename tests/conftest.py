"""One thread a test process: two busy cores make OpenMP crawl."""

import torch

torch.set_num_threads(1)
