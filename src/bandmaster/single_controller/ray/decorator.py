"""The names of verl 0.1's ``ray.decorator``."""

from bandmaster.single_controller.base.decorator import Dispatch, Execute, collect_all_to_all, register

__all__ = ["Dispatch", "Execute", "collect_all_to_all", "register"]
