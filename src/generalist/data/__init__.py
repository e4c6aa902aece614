"""Images and labels: data sets, on-device augmentation, held-out splits, batches."""
