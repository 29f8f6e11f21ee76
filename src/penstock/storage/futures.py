from penstock.storage.planned_use import NEVER, PlannedUses, Use, UsePublisher, object_name

__all__ = ["NEVER", "PlannedUses", "Use", "UsePublisher", "object_name"]
