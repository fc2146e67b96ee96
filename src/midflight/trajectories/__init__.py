"""Station 4: what happened to groups is durable, and groups become packed batches."""
