from penstock.storage.transfer import Cancel, Stat

__all__ = ["Cancel", "Stat"]
