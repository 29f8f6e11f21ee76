from penstock.storage.stream import Range, read_ranges

__all__ = ["Range", "read_ranges"]
