from penstock.storage.stream import in_threads

__all__ = ["in_threads"]
