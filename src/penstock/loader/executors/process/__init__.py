"""The process executor: worker processes, and batches that come in shared memory."""
