"""``register``, ``Dispatch``, ``Execute`` and ``collect_all_to_all`` under their import path in verl."""

from bandmaster.plan.transfer import Dispatch, Execute, collect_all_to_all
from bandmaster.registration import register

__all__ = ["Dispatch", "Execute", "collect_all_to_all", "register"]
