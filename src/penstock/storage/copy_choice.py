from penstock.storage.planned_use import all_fit as come_and_go
from penstock.storage.planned_use import bytes_for_copies as usable
from penstock.storage.planned_use import choose_copies as stay

__all__ = ["come_and_go", "stay", "usable"]
