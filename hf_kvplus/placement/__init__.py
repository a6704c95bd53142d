"""Where sealed pages live, and how they come back. `PLACEMENTS` maps a string's prefix to its class."""

from .base import PLACEMENTS, Placement, Storage, register_placement
from .offloaded import Offloaded
from .resident import Resident

__all__ = ["PLACEMENTS", "Offloaded", "Placement", "Resident", "Storage", "register_placement"]
