"""Trees of arrays go from one layout to another over the same devices, by explicit collectives, in bounded memory."""

from meshsys.reshard.plan import ReshardPlan, plan_reshard
from meshsys.reshard.resharder import Mode, Resharded, Resharder

__all__ = ["Mode", "ReshardPlan", "Resharded", "Resharder", "plan_reshard"]
