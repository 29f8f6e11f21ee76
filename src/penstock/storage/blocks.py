from penstock.storage.stream import BLOCK

__all__ = ["BLOCK"]
