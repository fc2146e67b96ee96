"""Station 4: groups are stored durably, and become packed batches."""
