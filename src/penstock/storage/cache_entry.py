from penstock.storage.download import Entry

__all__ = ["Entry"]
